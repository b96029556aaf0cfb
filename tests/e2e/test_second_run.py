"""The promise: what one process found out, the next one knows, by whatever way the answer reaches it.

Without a daemon, and with one that comes later: `test_explain.py`.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.home_daemons import daemons_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sandbox import Outcome, Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.daemon]


def assert_nothing_known(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.stderr
    assert outcome.counts["graphs"] > 0
    assert outcome.counts["hits"] == 0
    assert outcome.counts["misses"] == outcome.counts["looked_up"] > 0


def assert_all_known(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.stderr
    assert outcome.counts["hits"] == outcome.counts["graphs"] > 0
    assert outcome.counts["misses"] == 0
    assert outcome.counts["measured"] == 0


@pytest.mark.slow
def test_second_run_hits_every_graph(sandbox: Sandbox, plain: Outcome, tmp_path: Path) -> None:
    """With what Inductor has kept, and after compiling everything anew, though the daemon has died before that."""
    kept, empty = str(tmp_path / "first"), str(tmp_path / "second")
    pid = sandbox.start_daemon()

    first = sandbox.run("--mode", "reduce-overhead", TORCHINDUCTOR_CACHE_DIR=kept)
    second = sandbox.run("--mode", "reduce-overhead", TORCHINDUCTOR_CACHE_DIR=kept)
    os.kill(pid, signal.SIGKILL)
    anew = sandbox.run("--mode", "reduce-overhead", TORCHINDUCTOR_CACHE_DIR=empty)

    assert_nothing_known(first)
    for known in (second, anew):
        assert_all_known(known)
        assert known.counts["graphs"] == first.counts["graphs"]
        assert sum(known.counts["deployed"].values()) == known.counts["graphs"]
    for outcome in (first, second, anew):
        assert outcome.stdout == plain.stdout
    assert second.counts["daemon"]["version"] is not None
    assert anew.counts["daemon"]["version"] is None


@pytest.mark.slow
def test_hook_starts_the_daemon_when_asked(sandbox: Sandbox) -> None:
    assert sandbox.daemon_pid() is None

    first = sandbox.run("--brief", PYGRAPHD_AUTOSTART="1")
    while sandbox.daemon_pid() is None:  # the program may have ended before its daemon answers
        assert daemons_of(sandbox.home), "the hook started none, or it has ended"
    second = sandbox.run("--brief", PYGRAPHD_AUTOSTART="1")

    assert first.code == 0
    for outcome in (first, second):  # that it was just starting is no failure
        assert not any(each.startswith(("daemon", "database")) for each in outcome.counts["failures"])
    assert_all_known(second)
    assert second.counts["daemon"]["version"] is not None


@pytest.mark.slow
def test_a_home_that_is_only_read_stays_empty_though_a_daemon_is_asked_for(sandbox: Sandbox) -> None:
    """So the next one knows nothing either."""
    outcome = sandbox.run("--brief", PYGRAPHD_AUTOSTART="1", PYGRAPH_READONLY="1")

    assert sandbox.daemon_pid() is None
    assert daemons_of(sandbox.home) == []
    assert {path.name for path in sandbox.home.iterdir()} == {"summary-1.json"}
    assert_nothing_known(outcome)
    assert outcome.counts["withheld"] == outcome.counts["graphs"]
    assert outcome.counts["failures"]["daemon: not started: PYGRAPH_READONLY=1"] == 1
