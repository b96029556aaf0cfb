"""The promise: what one process found out, the next one knows, by whatever way the answer reaches it."""

from __future__ import annotations

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
@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.slow)])
def test_second_run_hits_every_graph(sandbox: Sandbox, mode: str) -> None:
    sandbox.start_daemon()

    first = sandbox.run("--mode", mode)
    second = sandbox.run("--mode", mode)

    assert_nothing_known(first)
    assert_all_known(second)
    assert second.counts["graphs"] == first.counts["graphs"]
    assert sum(second.counts["deployed"].values()) == second.counts["graphs"]
    assert second.counts["daemon"]["version"] is not None
    assert second.stdout == first.stdout


@pytest.mark.slow
def test_second_run_hits_after_compiling_everything_anew(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.start_daemon()

    cold = sandbox.run(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "first"))
    cold_again = sandbox.run(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "second"))

    assert_nothing_known(cold)
    assert_all_known(cold_again)
    assert cold_again.counts["graphs"] == cold.counts["graphs"]


@pytest.mark.slow
def test_hook_starts_the_daemon_when_asked(sandbox: Sandbox) -> None:
    assert sandbox.daemon_pid() is None

    first = sandbox.run(PYGRAPHD_AUTOSTART="1")
    while sandbox.daemon_pid() is None:  # the program may have ended before its daemon answers
        assert daemons_of(sandbox.home), "the hook started none, or it has ended"
    second = sandbox.run(PYGRAPHD_AUTOSTART="1")

    assert first.code == 0
    for outcome in (first, second):  # that it was just starting is no failure
        assert not any(each.startswith(("daemon", "database")) for each in outcome.counts["failures"])
    assert_all_known(second)
    assert second.counts["daemon"]["version"] is not None


@pytest.mark.slow
def test_a_home_that_is_only_read_stays_empty_though_a_daemon_is_asked_for(sandbox: Sandbox) -> None:
    outcomes = [sandbox.run(PYGRAPHD_AUTOSTART="1", PYGRAPH_READONLY="1") for _ in range(2)]

    assert sandbox.daemon_pid() is None
    assert {path.name for path in sandbox.home.iterdir()} == {"summary-1.json", "summary-2.json"}
    for outcome in outcomes:
        assert_nothing_known(outcome)
        assert outcome.counts["withheld"] == outcome.counts["graphs"]
        assert outcome.counts["failures"]["daemon: not started: PYGRAPH_READONLY=1"] == 1


@pytest.mark.slow
def test_what_was_found_without_a_daemon_is_known_with_and_without_one(sandbox: Sandbox) -> None:
    first = sandbox.run()
    second = sandbox.run()
    sandbox.start_daemon()
    beside = sandbox.run()
    sandbox.stop_daemon()
    after = sandbox.run()

    assert_nothing_known(first)
    assert first.counts["spooled"] == first.counts["graphs"]
    for known in (second, beside, after):
        assert_all_known(known)
    for alone in (first, second, after):
        assert alone.counts["daemon"]["version"] is None
    assert beside.counts["daemon"]["version"] is not None
