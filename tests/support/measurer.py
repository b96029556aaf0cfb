"""A process that measures the graphs of `compile_three`, and stops in the middle of that, for tests of who waits for it.

It is a fork of a process that has imported PyTorch, as importing takes most of what such a process would take.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 120.0
"""Only ends a test that hangs."""


def measure(connection: Connection, environ: Mapping[str, str]) -> None:
    """Begin to measure, say what failed and what was waited for, end that when told to, say what was recorded, and live on."""
    os.environ.clear()
    os.environ.update(environ)
    import torch._inductor.config as inductor_config

    from pygraphd.client.autotune import partition_trial
    from pygraphd.client.frontend.runtime import Runtime
    from tests.support.compiled import ENOUGH, compile_three, pretend_there_is_a_gpu, run
    from tests.support.patience import be_patient

    patch = pytest.MonkeyPatch()
    pretend_there_is_a_gpu(patch)
    be_patient(patch)
    with inductor_config.patch({"triton.cudagraphs": True}):
        session = Runtime()
        graphs = compile_three(session)
        run(*graphs, partition_trial.WARM_UP_CALLS + 3)
        connection.send(([*session.report.failures], session.report.counts["waited"]))
        connection.recv()
        run(*graphs, ENOUGH)
        connection.send(session.report.counts["recorded"])
    connection.recv()


@dataclass(frozen=True)
class Measurer:
    """The process, and the way to talk to it."""

    process: BaseProcess
    connection: Connection

    def answer(self) -> object:
        """Return what it says next."""
        assert self.connection.poll(TIMEOUT_S), "no answer"
        return self.connection.recv()

    def kill(self) -> None:
        """Kill it, and return when it has ended."""
        self.process.kill()
        self.process.join(TIMEOUT_S)
        assert not self.process.is_alive()


def start(environ: Mapping[str, str]) -> Measurer:
    """Return a process that has begun to measure."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.compiled", "tests.support.measurer"])
    mine, its = context.Pipe()
    process = context.Process(target=measure, args=(its, dict(environ)), daemon=True)
    process.start()
    its.close()
    started = Measurer(process, mine)
    try:
        assert started.answer() == ([], 0)
    except BaseException:
        started.kill()
        raise
    return started
