"""The ways into PyGraph, and that the user's program keeps its output, arguments, exit code and traceback in each.

`pygraphd run` without dashes is in `test_report.py`. What starts a new Python takes ten seconds, so each such run is asked
for several properties.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.sandbox import Outcome, Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.daemon, pytest.mark.slow]

RUN = (sys.executable, "-m", "pygraphd", "run", "--")


def assert_ended_by_its_own_mistake(outcome: Outcome) -> None:
    assert outcome.code == 1, outcome.stderr
    assert outcome.stderr.rstrip().endswith("LookupError: the user's own mistake")
    assert outcome.stderr.count("Traceback") == 1
    assert "pygraphd" not in outcome.stderr.partition("Traceback")[2]


def test_all_doors_lead_to_the_same_graphs(sandbox: Sandbox, plain: Outcome) -> None:
    """Through two of them the program fails in the end, as it is told to by an argument."""
    sandbox.start_daemon()

    variable = sandbox.run("--fail", command=(sys.executable,))
    command = sandbox.run("--fail", hook=False, command=RUN)
    enabled = sandbox.run("--enable", hook=False)
    backend = sandbox.run("--backend", "pygraph", hook=False)

    for failed in (variable, command):
        assert_ended_by_its_own_mistake(failed)
    for well in (enabled, backend):
        assert well.code == 0, well.stderr
    for outcome in (variable, command, enabled, backend):
        assert outcome.stdout == plain.stdout
        assert outcome.counts["graphs"] > 0
    for other in (command, enabled):
        assert other.counts["hits"] == other.counts["graphs"] == variable.counts["graphs"]


def test_closed_doors_leave_torch_alone(sandbox: Sandbox, plain: Outcome) -> None:
    outcome = sandbox.run(hook=False, PYGRAPH="0")

    assert (outcome.code, outcome.stdout, outcome.summary) == (0, plain.stdout, None)
