"""Processes that record together over a TCPStore: one that is killed or late has all of them run KERNELS, within the limits."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from pygraphd.client.backend.errors import RanksError
from pygraphd.client.decisions.ranks import lockstep
from pygraphd.client.decisions.ranks.lockstep import Lockstep
from pygraphd.client.decisions.ranks.write_once import Registers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.torch

RANKS = 3
SERVES, RUNS_KERNELS, KILLED = 0, 1, -signal.SIGKILL
LONG = datetime.timedelta(seconds=60)
_fork = multiprocessing.get_context("fork")


def rank(port: int, number: int, killed_at: int | None) -> None:
    """Go through all steps; die before one of them, or after the last."""
    store = dist.TCPStore("127.0.0.1", port, None, False, LONG)
    mine = Lockstep(Registers(lambda: store, str(number)), "graph/1", RANKS, 1.0)
    outcome = SERVES
    try:
        for step in range(len(lockstep.STEPS) + 1):
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step < len(lockstep.STEPS):
                mine.go_on()
    except RanksError:
        outcome = RUNS_KERNELS
    os._exit(outcome)


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[int, int | None], multiprocessing.process.BaseProcess]]:
    """Return what starts a rank."""
    monkeypatch.setattr(lockstep, "STEPS", (("captured", 1.0), ("compared", 1.0)))
    server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    started = []

    def begin(number: int, killed_at: int | None = None) -> multiprocessing.process.BaseProcess:
        process = _fork.Process(target=rank, args=(server.port, number, killed_at))
        process.start()
        started.append(process)
        return process

    yield begin
    for each in started:
        each.kill()
        each.join()


def ended(*processes: multiprocessing.process.BaseProcess) -> list[int | None]:
    for each in processes:
        each.join(60)
    return [each.exitcode for each in processes]


@pytest.mark.parametrize(
    ("killed_at", "others"), [(None, SERVES), (0, RUNS_KERNELS), (1, RUNS_KERNELS), (2, SERVES)]
)
def test_the_others_end_alike_if_one_is_killed(
    start: Callable[[int, int | None], multiprocessing.process.BaseProcess],
    killed_at: int | None,
    others: int,
) -> None:
    first, *rest = (start(number, killed_at if number == 0 else None) for number in range(RANKS))

    assert ended(*rest) == [others] * (RANKS - 1)
    assert ended(first) == [SERVES if killed_at is None else KILLED]


def test_one_that_comes_late_runs_kernels_as_all_others_do(
    start: Callable[[int, int | None], multiprocessing.process.BaseProcess],
) -> None:
    assert ended(start(0, None), start(1, None)) == [RUNS_KERNELS] * 2

    assert ended(start(2, None)) == [RUNS_KERNELS]
