"""A replay whose owner is gone, in the process that made it and in a fork of it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pygraphd.client.analysis.graph_facts import GraphFacts
from tests.support.recording_case import Case, add, case

__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch

HANGS_S = 20


def test_a_fork_leaves_a_replay_alone_that_a_thread_was_using(case: Case) -> None:
    """There is no such thread in the child, so that nothing would ever let go of the replay."""
    made = case.made(add, GraphFacts())
    for _ in range(3):
        made.run([case.floats(1), case.floats(2)])
    (replay,) = made.replays
    entered, done = threading.Event(), threading.Event()

    def use() -> None:
        with replay.counts:
            entered.set()
            done.wait()

    user = threading.Thread(target=use)
    user.start()
    entered.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would wait, too
        signal.alarm(HANGS_S)
        replay.__del__()
        os._exit(0)
    done.set()
    user.join()

    assert os.waitpid(child, 0)[1] == 0
    made.run([case.floats(1), case.floats(2)])
    assert replay.counts.replays > 0
    replay.__del__()
    assert replay._executables is None
