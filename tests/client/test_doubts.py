"""A summary says of each graph whose decision was known and not taken why, whose it was, and what was seen here.

The clock stands in for the GPU's, as in `test_plan`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client import options
from pygraphd.client.doubts import NOT_OFFERED, drifted, other_policy
from pygraphd.schema.messages import Decision, Deployment, RecordRequest, decode, encode
from pygraphd.schema.policy import POLICY_VERSION
from tests.client.test_plan import (
    ENOUGH,
    Clock,
    compile_once,
    relocation_where_it_is_meant,
    run,
    session,
    trained,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.session import Session

__all__ = ["relocation_where_it_is_meant", "session"]  # fixtures

pytestmark = pytest.mark.torch

SLOW_TREES = {Deployment.KERNELS: 50.0, Deployment.TREES: 412.0}
THEIRS = f"by uid {os.geteuid()} on elsewhere"


def told(of: Session) -> set[tuple[str, str]]:
    """Return where decisions had come from, and why not from what was known."""
    return {(each["source"], each["because"]) for each in of.report.summary()["decisions"]}


def test_what_was_unknown_or_is_taken_needs_no_reason(session: Session) -> None:
    first, _ = trained(session, ENOUGH)
    second, _ = trained(session, 3)

    assert (told(first), told(second)) == ({("measured", "")}, {("cache", "")})


def test_of_a_disputed_decision_it_is_told_whose_it_was_and_what_was_seen(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", SLOW_TREES)

    finished, _ = trained(session, 2 * ENOUGH)

    claimed = f"TREES: claimed 50.0 us {THEIRS}"
    assert told(finished) == {("measured", f"{claimed}, measured 412.0 us here")}
    assert finished.report.counts["disputed"] == 3


def test_a_program_that_ends_before_it_has_measured_anew_says_what_was_claimed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", SLOW_TREES)

    ended, _ = trained(session, 25)
    ended.close()

    assert ended.report.counts["disputed"] == 3
    assert told(ended) == {("unfinished", f"TREES: claimed 50.0 us {THEIRS}")}


def test_of_what_has_drifted_it_is_told_what_it_cost_before(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = BoxedDeviceIndex(0)
    graphs = (
        compile_once(session, 2, backward=False, box=box),
        compile_once(session, 1, backward=True, box=box),
    )
    run(*graphs)
    monkeypatch.setattr(Clock, "times_us", SLOW_TREES)
    session.drift.look()

    run(*graphs, 4 * ENOUGH)

    assert session.report.counts["drifted"] == 3
    assert told(session) == {("measured", "TREES: 50.0 us when that was decided, measured 412.0 us here")}


@pytest.mark.parametrize(
    ("variable", "value", "because"),
    [
        (options.REFRESH, "1", "PYGRAPH_REFRESH asks to measure anew"),
        (options.TRUST, "local", f"decided {THEIRS}, and PYGRAPH_TRUST=local"),
    ],
)
def test_what_the_user_does_not_want_is_told_as_that(
    session: Session, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, because: str
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setenv(variable, value)

    anew, _ = trained(session, ENOUGH)

    assert told(anew) == {("measured", because)}


def rewrite(session: Session, change: Callable[[Decision], Decision]) -> None:
    """Change the decisions that wait in the spool."""
    for path in session.locations.spool.iterdir():
        request = decode(RecordRequest, path.read_bytes())
        records = tuple(dataclasses.replace(each, decision=change(each.decision)) for each in request.records)
        path.write_bytes(encode(dataclasses.replace(request, records=records)))


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"policy": POLICY_VERSION - 1}, f"decided by policy {POLICY_VERSION - 1}, and this is policy {POLICY_VERSION}"),
        ({"deployment": Deployment.GRAPH}, NOT_OFFERED.text),
        ({"final": False, "calls": 7}, "not final, after 7 calls"),
    ],
    ids=["policy", "deployment", "final"],
)  # fmt: skip
def test_what_this_process_could_not_have_decided_is_told_as_that(
    session: Session, changes: dict[str, object], because: str
) -> None:
    trained(session, ENOUGH)
    rewrite(session, lambda decision: dataclasses.replace(decision, **changes))  # type: ignore[arg-type]

    anew, _ = trained(session, ENOUGH)

    assert told(anew) == {("measured", because)}


def test_a_doubt_that_is_about_no_cost_is_told_without_any() -> None:
    decision = Decision(Deployment.TREES, "", POLICY_VERSION - 1)

    assert other_policy(decision).costs is None
    assert drifted(Deployment.TREES, None).told() == "TREES: less or more when that was decided"
