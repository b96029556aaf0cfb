"""Processes that wait for each other, and then run one at a time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.lab.barrier import (
    AFTER_VARIABLE,
    THREADS_VARIABLE,
    VARIABLE,
    VECTORS_VARIABLE,
    Barrier,
    give_up,
    wait_for_turn,
    wait_to_compile,
)

ROOT = Path(__file__).resolve().parents[2]
HANGS_S = 120
PROGRAM = """
import sys, time
from pathlib import Path
from tools.lab.barrier import wait_for_turn, wait_to_compile
prepared, measured = Path(sys.argv[1]), Path(sys.argv[2])
wait_to_compile()
prepared.touch()
turn = wait_for_turn()
began = time.monotonic()
time.sleep(0.2)
ended = time.monotonic()
turn.end()
measured.write_text(f"{began} {ended} {time.monotonic()}")
"""


def start(folder: Path, name: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(folder / f"{name}.prepared"), str(folder / f"{name}.times")]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environ})


def test_without_a_barrier_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCHMARK_BARRIER", raising=False)

    assert wait_for_turn() is None


@pytest.mark.torch  # it takes seconds
def test_all_wait_for_the_last_and_then_run_one_at_a_time_in_order(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path / "barrier", [("a", 1), ("b", 2), ("c", 3)])
    first = [start(tmp_path, name, barrier.place(name).environ) for name in ("a", "b")]
    while not all((tmp_path / f"{name}.prepared").exists() for name in ("a", "b")):
        time.sleep(0.01)
    time.sleep(0.3)
    assert not list(tmp_path.glob("*.times"))

    last = start(tmp_path, "c", barrier.place("c").environ)

    assert [process.wait(HANGS_S) for process in (*first, last)] == [0, 0, 0]
    spans = [tuple(map(float, (tmp_path / f"{name}.times").read_text().split())) for name in "abc"]
    assert all(ended <= began for (_, ended, _), (began, _, _) in itertools.pairwise(spans))
    last_ended = max(ended for _, ended, _ in spans)
    assert all(
        afterwards >= last_ended for _, _, afterwards in spans
    )  # what disturbs others comes when all have been timed


@pytest.mark.torch  # it takes seconds
def test_those_that_share_compile_when_the_first_has_compiled(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path / "barrier", [("a", "same"), ("b", "other"), ("c", "same")])
    later = start(tmp_path, "c", barrier.place("c").environ)
    other = start(tmp_path, "b", barrier.place("b").environ)
    while not (tmp_path / "b.prepared").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    assert not (tmp_path / "c.prepared").exists()

    first = start(tmp_path, "a", barrier.place("a").environ)

    assert [process.wait(HANGS_S) for process in (first, other, later)] == [0, 0, 0]


@pytest.mark.torch  # it takes seconds
def test_none_is_timed_before_all_are_admitted(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path / "barrier", [("a", None)], held=True)
    process = start(tmp_path, "a", barrier.place("a").environ)
    while not (tmp_path / "a.prepared").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    assert not barrier.all_timed()
    assert not (tmp_path / "a.times").exists()

    barrier.admit()

    assert process.wait(HANGS_S) == 0
    assert (tmp_path / "a.times").exists()
    assert barrier.all_timed()


def test_what_one_has_given_up_to_compile_none_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = Barrier(tmp_path / "barrier", [("a", "same"), ("b", "same")])
    with barrier.place("a") as place, monkeypatch.context() as first:
        first.setenv(VARIABLE, place.environ[VARIABLE])
        give_up()

    monkeypatch.setenv(AFTER_VARIABLE, barrier.place("b").environ[AFTER_VARIABLE])
    with pytest.raises(TimeoutError, match="given up"):
        wait_to_compile()


def test_nobody_waits_for_a_process_that_has_ended(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path / "barrier", [("a", 1), ("b", 2)])
    with pytest.raises(ValueError, match="as a process may fail"), barrier.place("a"):
        raise ValueError("as a process may fail")

    assert start(tmp_path, "b", barrier.place("b").environ).wait(HANGS_S) == 0


def test_who_waits_ends_with_whoever_started_it(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path / "barrier", [("a", 1), ("b", 2)])
    environ = barrier.place("a").environ
    code = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {PROGRAM!r}, *sys.argv[1:]]); "
        "import time, pathlib\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "time.sleep(0.2)"
    )
    ended = tmp_path / "output"
    with ended.open("w") as output:
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "p"), str(tmp_path / "t")],
            cwd=ROOT, env={**os.environ, **environ}, stderr=output, check=True, timeout=HANGS_S,
        )  # fmt: skip
    deadline = time.monotonic() + HANGS_S
    while "has gone" not in ended.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "has gone" in ended.read_text()


EXPECTED = [("a", "same"), ("b", "other"), ("c", "same")]


def threads(barrier: Barrier) -> dict[str, str]:
    return {name: barrier.place(name).environ[THREADS_VARIABLE] for name, _ in EXPECTED}


def test_those_that_come_later_compile_in_no_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))

    assert threads(Barrier(tmp_path, EXPECTED)) == {"a": "3", "b": "3", "c": "1"}
    assert threads(Barrier(tmp_path, EXPECTED, cores=4)) == {"a": "2", "b": "2", "c": "1"}
    assert threads(Barrier(tmp_path, EXPECTED, cores=1)) == {"a": "1", "b": "1", "c": "1"}


def test_no_process_tries_out_what_the_cpu_says_of_its_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for set_by_the_user, expected in (("", "1"), ("0", "0")):
        monkeypatch.setenv(VECTORS_VARIABLE, set_by_the_user)
        assert Barrier(tmp_path, EXPECTED).place("b").environ[VECTORS_VARIABLE] == expected


def test_who_says_how_many_threads_compile_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "5")

    assert threads(Barrier(tmp_path, EXPECTED)) == {"a": "5", "b": "5", "c": "5"}
