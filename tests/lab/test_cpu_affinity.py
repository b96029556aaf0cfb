"""Timings are taken at full speed, on whichever cores that is to be had, and again if it was lost meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.lab import cpu_affinity as cores
from tools.lab.cpu_affinity import TRIES, Cores

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWED = sorted(os.sched_getaffinity(0))


class Machine:
    """Cores of which some take twice as long; `slow` may change at any time."""

    def __init__(self) -> None:
        self.slow: set[int] = set()
        self.looked = 0

    def loop_us(self) -> float:
        self.looked += 1
        here = os.sched_getaffinity(0)
        return 200.0 if here & self.slow else 100.0


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine, on all of whose cores this process may run again in the end."""
    yield Machine()
    cores._stay_on(ALLOWED)


def test_what_is_measured_at_full_speed_is_measured_once(machine: Machine, tmp_path: Path) -> None:
    watched, calls = Cores(tmp_path / "full-speed", machine.loop_us), itertools.count(1)

    assert watched.undisturbed(lambda: next(calls)) == 1
    assert (watched.timings, watched.disturbed) == (1, 0)
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


@pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one core")
def test_it_goes_to_a_core_that_runs_at_full_speed_with_the_threads_of_backwards(
    machine: Machine, tmp_path: Path
) -> None:
    watched = Cores(tmp_path / "full-speed", machine.loop_us)
    machine.slow = {ALLOWED[0]}
    with _thread("pt_autograd_0") as backward, _thread("python3") as worker:
        there = watched.undisturbed(lambda: [os.sched_getaffinity(each) for each in (backward, worker)])

    # Those that share work of the CPU would wait for each other on so few cores.
    assert there == [os.sched_getaffinity(0), set(ALLOWED)]
    assert ALLOWED[0] not in os.sched_getaffinity(0)
    assert watched.disturbed == 0


@contextlib.contextmanager
def _thread(name: str) -> Iterator[int]:
    """Have a thread that is called so; yields its number."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait(30))
    thread.start()
    try:
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text(name)
        yield thread.native_id or 0
    finally:
        stop.set()
        thread.join()


def test_what_was_disturbed_is_measured_again(machine: Machine, tmp_path: Path) -> None:
    watched, calls = Cores(tmp_path / "full-speed", machine.loop_us), itertools.count(1)

    def measure() -> int:
        call = next(calls)
        machine.slow = set(ALLOWED) if call == 1 else set()
        return call

    # All cores are slow at its end, and are not any more when it is tried again.
    assert watched.undisturbed(measure) == 2
    assert (watched.timings, watched.disturbed) == (1, 0)


def test_where_it_is_never_quiet_the_last_is_kept_and_counted(machine: Machine, tmp_path: Path) -> None:
    file, calls = tmp_path / "full-speed", itertools.count(1)
    Cores(file, machine.loop_us)
    machine.slow = set(ALLOWED)
    watched = Cores(file, machine.loop_us)  # another process, which has never seen full speed itself

    assert watched.undisturbed(lambda: next(calls)) == TRIES
    assert (watched.timings, watched.disturbed) == (1, 1)


def test_a_file_that_says_nothing_is_written_anew(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "full-speed"
    file.write_text("")

    Cores(file, machine.loop_us)

    assert float(file.read_text()) == 100.0


def test_the_folder_need_not_be_there(machine: Machine, tmp_path: Path) -> None:
    Cores(tmp_path / "new" / "full-speed", machine.loop_us)

    assert (tmp_path / "new" / "full-speed").exists()
