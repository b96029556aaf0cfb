"""What is kept of tests that fail, by real runs of pytest with workers, and on which GPUs workers begin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.lab.gpu_slots import VISIBLE
from tools.lab.pytest_plugin import FILE, GPUS, error_of, spread

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import os, time
import pytest

def test_good(): pass
def test_compared():
    a, b = 3, 4
    assert a == b
def test_of_a_program():
    output = "Traceback ...\\nRuntimeError: there is none\\nsome advice"
    assert not output, output
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_without_a_fixture(nothing): pass
"""
SEEN = """
import os, pytest
@pytest.mark.parametrize("number", range(4))
def test_seen(number): open(os.environ["SEEN"] + os.environ["PYTEST_XDIST_WORKER"], "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
"""
SLOW = """
import pathlib, time
def test_bad(): raise ValueError("at once")
def test_slow():
    pathlib.Path({seen!r}).touch()
    time.sleep(100)
"""


def command(folder: Path, text: str, *arguments: str) -> list[str]:
    (folder / "test_it.py").write_text(text)
    plugins = ["-p", "tools.lab.pytest_plugin", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    return [
        sys.executable,
        "-m",
        "pytest",
        *plugins,
        "-c",
        os.devnull,
        f"--confcutdir={folder}",  # or a conftest.py in a folder above is run
        *arguments,
        str(folder / "test_it.py"),
    ]


def environ(folder: Path, **more: str) -> dict[str, str]:
    # Nothing of the pytest that this is one of, nor plugins that take longer to import than all else.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {
        **own,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        FILE: str(folder / "tests.json"),
        "BENCHMARK_COMMIT": "abc",
        **more,
    }


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "tests.json").read_text())
    return found


def printed(folder: Path) -> list[str]:
    arguments = ["-m", "tools.lab.pytest_plugin", str(folder / "tests.json")]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.torch  # it takes seconds
@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "worksteal")], ids=["alone", "workers"])
def test_each_failed_test_has_its_error(tmp_path: Path, workers: tuple[str, ...]) -> None:
    done = subprocess.run(
        command(tmp_path, TESTS, *workers),
        cwd=ROOT,
        env=environ(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    found = content(tmp_path)
    assert found["counts"] == {"passed": 1, "failed": 3, "skipped": 1}
    assert {each["test"].partition("::")[2]: each["error"] for each in found["failed"]} == {
        "test_compared": "assert 3 == 4",
        "test_of_a_program": "RuntimeError: there is none",
        "test_without_a_fixture": "fixture 'nothing' not found",
    }
    assert found["environment"]["commit"] == "abc"
    assert found["missing"] == []
    lines = printed(tmp_path)
    assert lines[-1] == "3 failed, 1 passed, 1 skipped"
    assert sum("::test_compared: assert 3 == 4" in line for line in lines) == 1


@pytest.mark.torch  # it takes seconds
def test_what_cannot_be_collected_is_a_failure(tmp_path: Path) -> None:
    subprocess.run(
        command(tmp_path, "import nothing_of_that_name"),
        cwd=ROOT,
        env=environ(tmp_path),
        capture_output=True,
        check=False,
    )

    (failed,) = content(tmp_path)["failed"]
    assert failed["error"] == "ModuleNotFoundError: No module named 'nothing_of_that_name'"


@pytest.mark.torch  # it takes seconds
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "workers"])
def test_what_failed_before_the_end_is_kept_and_printed(tmp_path: Path, workers: tuple[str, ...]) -> None:
    seen = tmp_path / "seen"
    run = command(tmp_path, SLOW.format(seen=str(seen)), *workers)
    with subprocess.Popen(
        run, cwd=ROOT, env=environ(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            ends = time.monotonic() + 60
            while not (seen.exists() and content(tmp_path)["failed"]):
                assert process.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.05)
            assert not content(tmp_path)["ended"]
            process.terminate()
            output, _ = process.communicate(timeout=60)
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None

    assert "ValueError: at once" in output
    assert [each["error"] for each in content(tmp_path)["failed"]] == ["ValueError: at once"]
    assert [each.partition("::")[2] for each in content(tmp_path)["missing"]] == ["test_slow"]
    first, missing, last = printed(tmp_path)
    assert first.endswith("::test_bad: ValueError: at once")
    assert missing.endswith("::test_slow: not done")
    assert last == "1 failed; ended before they were done"


@pytest.mark.torch  # it takes seconds
@pytest.mark.parametrize(
    ("told", "expected"),
    [("", {"0,1", "1,0"}), ("7,5", {"7,5", "5,7"})],
)
def test_workers_see_all_gpus_and_begin_at_different_ones(
    tmp_path: Path, told: str, expected: set[str]
) -> None:
    run = command(tmp_path, SEEN, "-n", "2", "--dist", "each")
    variables = environ(tmp_path, **{GPUS: "2", VISIBLE: told, "SEEN": f"{tmp_path}/worker."})

    subprocess.run(run, cwd=ROOT, env=variables, capture_output=True, check=True)

    assert {file.read_text() for file in tmp_path.glob("worker.*")} == expected


def test_one_gpu_is_left_as_it_is() -> None:
    assert spread("gw3", 1) == {}


@pytest.mark.parametrize(
    ("traceback", "error"),
    [
        ("worker 'gw1' crashed while running 'test_it.py::test'", "worker 'gw1' crashed while running 'test_it.py::test'"),
        ("E   ValueError: a\n\nDuring handling ...\nE   RuntimeError: b\n\nfile.py:3: RuntimeError", "RuntimeError: b"),
        ("E   assert 1 == 2\nE    +  where 1 = f()", "assert 1 == 2"),
        ("E   Failed: Timeout (>300.0s) from pytest-timeout.", "Failed: Timeout (>300.0s) from pytest-timeout."),
        ("", "no traceback"),
    ],
)  # fmt: skip
def test_the_error_is_the_line_that_tells_most(traceback: str, error: str) -> None:
    assert error_of(traceback) == error
