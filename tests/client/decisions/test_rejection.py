"""A summary says of each graph whose decision was known and not taken why, and whose it was.

The clock stands in for the GPU's, as in `test_plan`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.frontend import settings
from pygraphd.schema.messages import Decision, Deployment, RecordRequest, decode, encode
from pygraphd.schema.policy import POLICY_VERSION
from tests.support.clock import Clock
from tests.support.compiled import (
    ENOUGH,
    relocating,
    session,
    trained,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.frontend.runtime import Runtime

__all__ = ["relocating", "session"]  # fixtures

pytestmark = pytest.mark.torch

SLOW = {Deployment.KERNELS: 50.0, Deployment.GRAPH: 412.0}
THEIRS = f"by uid {os.geteuid()} on elsewhere"


def told(of: Runtime) -> set[tuple[str, str, str]]:
    """Return where decisions had come from, and why not from what was known: the code and its detail."""
    decisions = of.report.summary()["decisions"]
    because = [(each["source"], each["because"] or {"code": "", "detail": ""}) for each in decisions]
    return {(source, reason["code"], reason["detail"]) for source, reason in because}


def test_what_was_unknown_or_is_taken_needs_no_reason(session: Runtime) -> None:
    first, _ = trained(session, ENOUGH)
    second, _ = trained(session, 3)

    assert (told(first), told(second)) == ({("measured", "", "")}, {("cache", "", "")})


def test_of_a_disputed_decision_it_is_told_whose_it_was(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", SLOW)

    finished, _ = trained(session, 2 * ENOUGH)

    assert told(finished) == {
        ("measured", "cost_differs", f"GRAPH 50.0 us of host time, 50.0 us on the GPU {THEIRS}")
    }
    assert finished.report.counts["disputed"] == 3


def test_a_program_that_ends_before_it_has_measured_anew_says_what_was_claimed(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", SLOW)

    ended, _ = trained(session, 25)
    ended.close()

    assert ended.report.counts["disputed"] == 3
    assert told(ended) == {
        ("unfinished", "cost_differs", f"GRAPH 50.0 us of host time, 50.0 us on the GPU {THEIRS}")
    }


@pytest.mark.parametrize(
    ("variable", "value", "code", "detail"),
    [
        (settings.REFRESH, "1", "refresh_asked", ""),
        (settings.TRUST, "local", "not_trusted", THEIRS),
    ],
)
def test_what_the_user_does_not_want_is_told_as_that(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, code: str, detail: str
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setenv(variable, value)

    anew, _ = trained(session, ENOUGH)

    assert told(anew) == {("measured", code, detail)}


def rewrite(session: Runtime, change: Callable[[Decision], Decision]) -> None:
    """Change the decisions that wait in the spool."""
    for path in session.locations.spool.iterdir():
        request = decode(RecordRequest, path.read_bytes())
        records = tuple(dataclasses.replace(each, decision=change(each.decision)) for each in request.records)
        path.write_bytes(encode(dataclasses.replace(request, records=records)))


@pytest.mark.parametrize(
    ("changes", "code", "detail"),
    [
        ({"policy": POLICY_VERSION - 1}, "other_policy", f"{POLICY_VERSION - 1}, and this is {POLICY_VERSION}"),
        ({"final": False, "calls": 7}, "not_final", "7 calls"),
    ],
    ids=["policy", "final"],
)  # fmt: skip
def test_what_this_process_could_not_have_decided_is_told_as_that(
    session: Runtime, changes: dict[str, object], code: str, detail: str
) -> None:
    trained(session, ENOUGH)
    rewrite(session, lambda decision: dataclasses.replace(decision, **changes))  # type: ignore[arg-type]

    anew, _ = trained(session, ENOUGH)

    assert told(anew) == {("measured", code, detail)}
