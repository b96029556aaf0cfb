"""A process that serves a TCPStore is stopped for a while: a rank decides nothing alone, and agrees with the others afterwards."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from pygraphd.client.common.report import Report
from pygraphd.client.decisions.ranks.consensus import Agreement
from pygraphd.client.decisions.ranks.reachability import FIRST_PAUSE_S
from pygraphd.client.decisions.ranks.write_once import Registers
from pygraphd.schema.messages import Decision, Deployment
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

pytestmark = pytest.mark.torch

GRAPH, LATER, HERE = "a" * 64, "b" * 64, "e" * 64
FASTER = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)
LONG = datetime.timedelta(seconds=120)
_fork = multiprocessing.get_context("fork")


def serve(ready: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    ready.send(store.port)
    signal.pause()


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Return the pid and the port of a process that serves a store."""
    mine, its = _fork.Pipe()
    process = _fork.Process(target=serve, args=(its,))
    process.start()
    assert process.pid is not None
    yield process.pid, mine.recv()
    process.kill()
    process.join()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def test_ranks_agree_again_once_the_process_of_their_store_goes_on(server: tuple[int, int]) -> None:
    pid, port = server
    now, report = time.monotonic(), Report()
    stores = [dist.TCPStore("127.0.0.1", port, None, False, LONG) for _ in range(2)]
    registers = [Registers(lambda each=each: each, str(id(each)), 60.0) for each in stores]  # type: ignore[misc]
    leader, other = (Agreement(each, report, clock=lambda: now) for each in registers)
    leads, follows = leader.role(GRAPH, [GRAPH], HERE), other.role(GRAPH, [GRAPH], HERE)
    assert (leads.leads, follows.leads) == (True, False)

    stop(pid)
    for each in registers:
        each._limit_s = 0.2  # which nothing can answer in now
    assert leads.propose(GRAPH, FASTER) is None
    assert follows.wait(GRAPH, 0.0) is None
    assert not leader.role(LATER, [LATER], HERE).leads
    os.kill(pid, signal.SIGCONT)
    for each in registers:
        each._limit_s = 60.0
    assert leads.propose(GRAPH, FASTER) is None  # for a while, nothing is asked
    now += FIRST_PAUSE_S

    assert leads.propose(GRAPH, FASTER) == follows.wait(GRAPH, 0.0) == FASTER
    assert [each.role(LATER, [LATER], HERE).leads for each in (leader, other)] == [True, False]
    assert report.failures == {"ranks: no answer in time": 2}
