"""Each kind of refusal has a code of its own, which is stored; its text is the detail."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.recording import comparison, verification
from pygraphd.client.replay.relocation_table import BLOCK
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.recording_case import Case, Operations, add, case

if TYPE_CHECKING:
    from pygraphd.client.recording.recordings import Recordings

__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch


def called(run: Recordings, case: Case, *more: Any) -> Reason | None:
    for _ in range(5):
        run([case.floats(1), case.floats(2), *more])
    return run.why_refused


def code(reason: Reason | None) -> str:
    return "" if reason is None else reason.code.value


def test_what_can_be_recorded_has_none(case: Case) -> None:
    assert called(case.make(add), case) is None


def test_what_lies_in_the_graph(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], inputs[1]),)

    assert called(case.make(body), case, "text") == Reason(ReasonCode.CANNOT_BE_RECORDED, "input 2 is a str")


def test_too_little_memory(case: Case) -> None:
    case.recorder.free = 3 * BLOCK

    assert code(called(case.make(add), case)) == "no_memory_to_record"


def test_an_error_of_ours(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraphd.client.recording.verification.copies_of", lambda *inputs: 1 // 0)

    reason = called(case.make(add), case)

    assert reason == Reason(
        ReasonCode.RECORDING_FAILED, "recording failed: integer division or modulo by zero"
    )


def test_other_results(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    number = itertools.count()
    differs = lambda *_: comparison.Disagreement(f"output {next(number)} differs", in_values=True)  # noqa: E731
    monkeypatch.setattr(verification, "compare", differs)

    assert code(called(case.make(add), case)) == "results_differ"
