"""The ways into PyGraph, and that the user's program keeps its output, arguments, exit code and traceback in each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.sandbox import Outcome, Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.daemon, pytest.mark.slow]

RUN = (sys.executable, "-m", "pygraphd", "run", "--")


def test_run_command_passes_arguments_on(sandbox: Sandbox, plain: Outcome) -> None:
    outcome = sandbox.run("--exit", "7", hook=False, command=RUN)

    assert (outcome.code, outcome.stdout) == (7, plain.stdout), outcome.stderr
    assert outcome.counts["graphs"] > 0


def test_run_command_without_dashes(sandbox: Sandbox, plain: Outcome) -> None:
    outcome = sandbox.run("--mode", "default", hook=False, command=RUN[:-1])

    assert (outcome.code, outcome.stdout) == (0, plain.stdout), outcome.stderr
    assert outcome.counts["graphs"] > 0


def test_backend(sandbox: Sandbox, plain: Outcome) -> None:
    outcome = sandbox.run("--backend", "pygraph", hook=False)

    assert (outcome.code, outcome.stdout) == (0, plain.stdout), outcome.stderr
    assert outcome.counts["graphs"] > 0


def test_all_doors_lead_to_the_same_graphs(sandbox: Sandbox, plain: Outcome) -> None:
    sandbox.start_daemon()

    first = sandbox.run(command=(sys.executable,))
    others = [sandbox.run("--enable", hook=False), sandbox.run(hook=False, command=RUN)]

    assert first.counts["graphs"] > 0
    for outcome in (first, *others):
        assert (outcome.code, outcome.stdout) == (0, plain.stdout), outcome.stderr
    for other in others:
        assert other.counts["hits"] == other.counts["graphs"] == first.counts["graphs"]


def test_closed_doors_leave_torch_alone(sandbox: Sandbox, plain: Outcome) -> None:
    outcome = sandbox.run(hook=False, PYGRAPH="0")

    assert (outcome.code, outcome.stdout, outcome.summary) == (0, plain.stdout, None)


@pytest.mark.parametrize("command", [(sys.executable,), RUN], ids=["variable", "run"])
def test_exception_keeps_exit_code_and_traceback(
    sandbox: Sandbox, plain: Outcome, command: tuple[str, ...]
) -> None:
    outcome = sandbox.run("--fail", command=command, hook=command != RUN)

    assert (outcome.code, outcome.stdout) == (1, plain.stdout)
    assert outcome.stderr.rstrip().endswith("LookupError: the user's own mistake")
    assert outcome.stderr.count("Traceback") == 1
    assert "pygraphd" not in outcome.stderr.partition("Traceback")[2]
    assert outcome.counts["graphs"] > 0
