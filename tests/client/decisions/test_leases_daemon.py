"""A process waits for another that measures, until that has the answer, is killed, or lets its lease run out.

Real processes beside a real daemon.

The clock stands in for the GPU's, as in `test_plan`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.autotune import partition_trial
from pygraphd.client.decisions import leases
from pygraphd.client.frontend.runtime import Runtime
from tests.support import measurer as measurers
from tests.support.compiled import ENOUGH, compile_three, relocating, run, session, sources
from tests.support.daemon_home import Home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.measurer import Measurer

__all__ = ["relocating", "session"]  # fixtures

pytestmark = [pytest.mark.torch, pytest.mark.daemon, pytest.mark.usefixtures("patient"), pytest.mark.slow]

AS_KERNELS, CAPTURED = (["kernels"] * 2, ["kernels"]), (["relocated"] * 2, ["relocated"])
GRAPHS = 3
TIMEOUT_S = 120.0


@pytest.fixture
def lease() -> str:
    """Return how long leases are: what is free before an hour is over is so for another reason."""
    return "1h"


@pytest.fixture
def home(tmp_path: Path, lease: str) -> Iterator[Home]:
    """Return the session's home, with a daemon."""
    opened = Home(tmp_path, {"PYGRAPHD_LEASE": lease})
    try:
        opened.start()
        yield opened
    finally:
        opened.close()


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have who waits ask at each call."""
    monkeypatch.setattr(leases, "FIRST_POLL_S", 0.0)
    monkeypatch.setattr(leases, "LONGEST_POLL_S", 0.0)


def run_until(session: Runtime, graphs: tuple[Any, Any], count: str) -> None:
    """Call graphs until all are counted as something."""
    deadline = time.monotonic() + TIMEOUT_S
    while session.report.counts[count] < GRAPHS:
        run(*graphs, 1)
        assert time.monotonic() < deadline, session.report.summary()


@pytest.fixture
def measurer(home: Home) -> Iterator[Measurer]:
    """Return another process, which is measuring."""
    started = measurers.start(home.environ)
    yield started
    started.kill()


@pytest.mark.usefixtures("looking")
def test_who_waits_for_a_measurer_that_is_killed_measures_itself(
    home: Home, measurer: Measurer, session: Runtime
) -> None:
    graphs = compile_three(session)
    assert home.ask("GET", "/v1/stats")[1]["leases"] == GRAPHS

    waiting = run(*graphs, ENOUGH)
    before = session.report.summary()
    measurer.kill()
    run_until(session, graphs, "recorded")

    assert waiting == [AS_KERNELS] * ENOUGH
    assert (before["waited"], before["measured"], before["recorded"]) == (GRAPHS, 0, 0)
    assert before["fallbacks"].keys() == {partition_trial.WAITING}
    after = session.report.summary()
    assert (after["measured"], after["recorded"], after["adopted"]) == (GRAPHS, GRAPHS, 0)
    assert sources(session) == {("GRAPH", "measured")}
    assert run(*graphs, 3) == [CAPTURED] * 3
    assert session.report.failures == {}
    assert home.ask("GET", "/v1/stats")[1]["entries"] == GRAPHS


def test_what_was_measured_after_a_measurers_death_is_known_to_the_next(
    home: Home, measurer: Measurer, session: Runtime
) -> None:
    measurer.kill()

    run(*compile_three(session), ENOUGH)
    told = Runtime(session.locations)

    assert run(*compile_three(told), 3) == [CAPTURED] * 3
    assert (session.report.counts["waited"], session.report.counts["measured"]) == (0, GRAPHS)
    assert (told.report.counts["hits"], told.report.counts["measured"]) == (GRAPHS, 0)
    assert home.ask("GET", "/v1/stats")[1]["records"] == GRAPHS


@pytest.mark.usefixtures("looking")
def test_what_another_process_finds_out_is_taken_up_by_who_waits_while_it_runs(
    home: Home, measurer: Measurer, session: Runtime
) -> None:
    graphs = compile_three(session)

    waiting = run(*graphs, ENOUGH)
    measurer.connection.send("go on")
    assert measurer.answer() == GRAPHS
    run_until(session, graphs, "adopted")

    assert waiting == [AS_KERNELS] * ENOUGH
    assert run(*graphs, 3) == [CAPTURED] * 3
    counts = session.report.summary()
    assert (counts["waited"], counts["adopted"], counts["measured"], counts["recorded"]) == (3, 3, 0, 0)
    assert sources(session) == {("GRAPH", "cache")}
    assert session.report.failures == {}
    stats = home.ask("GET", "/v1/stats")[1]
    assert (stats["entries"], stats["records"]) == (GRAPHS, GRAPHS)
    assert measurer.process.is_alive()


@pytest.mark.usefixtures("looking")
def test_who_does_not_call_any_more_but_lives_is_waited_for(measurer: Measurer, session: Runtime) -> None:
    steps = run(*compile_three(session), 3 * ENOUGH)

    assert measurer.process.is_alive()
    assert steps == [AS_KERNELS] * 3 * ENOUGH
    assert (session.report.counts["waited"], session.report.counts["measured"]) == (GRAPHS, 0)


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("lease", ["0.5s"])
def test_who_does_not_call_any_more_is_waited_for_no_longer_than_its_lease(
    home: Home, measurer: Measurer, session: Runtime
) -> None:
    graphs = compile_three(session)

    run_until(session, graphs, "recorded")

    assert measurer.process.is_alive()
    counts = session.report.summary()
    assert (counts["measured"], counts["recorded"], counts["adopted"]) == (GRAPHS, GRAPHS, 0)
    assert run(*graphs, 3) == [CAPTURED] * 3
    assert session.report.failures == {}
    assert home.ask("GET", "/v1/stats")[1]["entries"] == GRAPHS
