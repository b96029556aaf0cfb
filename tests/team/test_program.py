"""A program that waits for its daemon takes up what its team has measured, and measures nothing itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch._inductor.config as inductor_config
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.decisions import leases
from pygraphd.client.frontend.runtime import Runtime
from tests.support.compiled import compile_once, relocating, run, sources
from tests.support.daemon_home import HANGS_S
from tests.support.team import PUBLISHER, READER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.team import Member, TeamDatabase

__all__ = ["relocating"]  # a fixture

pytestmark = [pytest.mark.team, pytest.mark.torch, pytest.mark.usefixtures("relocating", "patient")]

GRAPHS = 3


@pytest.fixture(autouse=True)
def captures() -> Iterator[None]:
    with inductor_config.patch({"triton.cudagraphs": True}):
        yield


def models(told: Runtime) -> tuple[Any, Any]:
    """Compile a forward of two partitions and its backward."""
    box = BoxedDeviceIndex(0)
    return (
        compile_once(told, 2, backward=False, box=box),
        compile_once(told, 1, backward=True, box=box),
    )


def run_until(told: Runtime, graphs: tuple[Any, Any], count: str) -> None:
    """Call graphs until all are counted as something: on a busy machine samples are noisy, and taken again."""
    deadline = time.monotonic() + HANGS_S
    while told.report.counts[count] < GRAPHS:
        run(*graphs, 1)
        assert time.monotonic() < deadline, told.report.summary()


def test_a_running_program_takes_up_what_its_team_has_measured(
    shared: TeamDatabase, member: Callable[[str], Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "FIRST_POLL_S", 0.0)
    monkeypatch.setattr(leases, "LONGEST_POLL_S", 0.0)
    one = member(shared.url(PUBLISHER))
    one.start()
    first = Runtime(one.locations)
    run_until(first, models(first), "recorded")
    one.wait_until(lambda: one.stats["team_published"] == GRAPHS)

    other = member(shared.url(READER))
    other.variables["TEAM_AWAITED_S"] = "60"  # however busy this machine is
    other.start()
    second = Runtime(other.locations)
    graphs = models(second)
    assert (second.report.counts["hits"], second.report.counts["misses"]) == (0, GRAPHS)
    run_until(second, graphs, "adopted")

    counts = second.report.counts
    # How many had to wait is for the machine to say: all of the team's answers may be there by the time that a later one is asked for.
    assert (counts["adopted"], counts["measured"], counts["recorded"]) == (GRAPHS, 0, 0)
    assert counts["waited"] <= GRAPHS
    assert sources(second) == {("GRAPH", "cache")}
    assert second.report.failures == {}
