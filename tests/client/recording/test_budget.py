"""What a recording takes is asked for before it is allocated, and is within `PYGRAPH_MEMORY` at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.recording import stand_ins
from pygraphd.client.recording.budget import OVER_LIMIT
from pygraphd.client.replay.relocation_table import BLOCK, PAGE
from pygraphd.schema.reasons import ReasonCode
from tests.support.recording_case import Case, Operations, Recording, add, case, is_transient
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.recording.recordings import Recordings

__all__ = ["case"]  # a fixture
pytestmark = pytest.mark.torch

READ_ONLY = GraphFacts(written=frozenset())
CUSTOM = GraphFacts(is_repeatable=False, written=frozenset())
"""A graph with a custom operator: its captures have memory of their own."""


def call(case: Case, run: Recordings, calls: int = 3) -> None:
    for value in range(calls):
        run([case.floats(*[value] * 300), case.floats(*[2] * 300)])


def memory(case: Case) -> dict[str, int]:
    found: dict[str, int] = case.report.summary()["memory"]
    return found


def twice(operations: Operations, inputs: list[Any]) -> Any:
    """Have two captures, since the addresses in a structure may be numbers."""
    return (operations.first(inputs[0], 2),)


def in_its_place(operations: Operations, inputs: list[Any]) -> Any:
    """Have an output lie where a temporary was, so that the next capture has a reserve for it."""
    temporary = operations.add(inputs[0], inputs[1])
    result = operations.add(temporary, temporary)
    operations.done(temporary)
    return result, operations.add(result, inputs[1])


@pytest.mark.parametrize("body", [add, twice, in_its_place])
@pytest.mark.parametrize("has_addresses", [False, True])
def test_the_peak_that_the_summary_names_is_the_least_limit_that_suffices(
    case: Case, body: Callable[[Operations, list[Any]], Any], has_addresses: bool
) -> None:
    case.recorder.addresses = 64 * PAGE * has_addresses
    call(case, case.made(body, READ_ONLY))
    needed = memory(case)["peak_requested_bytes"]
    assert needed >= (PAGE if has_addresses else 8 * BLOCK)
    case.expect(captured=1)

    for limit, captured in ((needed - 1, 1), (needed, 2)):
        case.recorder.memory_bytes = limit
        run = case.made(body, READ_ONLY)
        call(case, run)
        case.expect(captured=captured)
        assert (refusal_of(run) == OVER_LIMIT) == (limit < needed)
    assert memory(case)["refused_recordings"] == 1
    assert case.emulator.live_memory() == 0


def test_a_capture_in_memory_of_its_own_is_not_begun_if_a_call_takes_more(case: Case) -> None:
    case.recorder.memory_bytes, case.recorder.peak_of_a_call = 1 << 20, 1 << 20
    run = case.made(add, CUSTOM)
    call(case, run)

    assert case.recorder.captures == 0
    assert run.why_refused is not None
    assert (run.why_refused.code, refusal_of(run)) == (ReasonCode.NO_MEMORY_TO_RECORD, OVER_LIMIT)
    assert is_transient(run)

    case.recorder.peak_of_a_call >>= 1
    call(case, run, 20)  # it is tried again after 16
    case.expect(captured=1)


def test_a_second_capture_is_asked_for_by_what_the_first_one_took(case: Case) -> None:
    """Before the first one there is only an estimate, the process's peak. Beside the first one it would be too much."""
    case.recorder.memory_bytes = 1 << 20
    case.recorder.peak_of_a_call = (1 << 20) - 12 * BLOCK  # eight for the inputs
    call(case, case.made(twice, CUSTOM))

    assert case.recorder.captures == 2
    case.expect(captured=1)


def test_a_capture_for_which_addresses_do_not_do_is_asked_for_as_well(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if isinstance(operations, Recording) and case.recorder.captures == 1:
            raise RuntimeError("it asks more of memory than an address")
        return add(operations, inputs)

    case.recorder.addresses = 64 * PAGE
    case.recorder.memory_bytes = case.recorder.peak_of_a_call = 8 * PAGE
    run = case.made(body, READ_ONLY)
    call(case, run)

    assert (case.recorder.captures, refusal_of(run)) == (1, OVER_LIMIT)
    assert case.emulator.live_memory() == 0


def test_memory_of_a_capture_counts_while_its_replay_is_verified(case: Case) -> None:
    """Also such as no node refers to, which the replay does not need."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if isinstance(operations, Recording):
            operations.arena.allocate(30 * BLOCK // 4)
        return add(operations, inputs)

    peaks = []
    for each in (add, body):
        run = case.made(each, READ_ONLY)
        for _ in range(3):
            run([case.floats(1), case.floats(2)])
        peaks.append(memory(case)["peak_requested_bytes"])
    case.expect(captured=2)
    assert peaks[1] >= 30 * BLOCK > peaks[0]


def test_other_indices_that_a_verification_computes_count(case: Case) -> None:
    peaks = []
    for kind in (torch.float64, torch.int64):
        third = case.allocator.tensor(torch.arange(64 * BLOCK // 8).to(kind))
        run = case.made(add, READ_ONLY)
        for _ in range(3):
            run([case.floats(1), case.floats(2), third])
        peaks.append(memory(case)["peak_requested_bytes"])
    case.expect(captured=2)
    assert peaks[1] - peaks[0] == 3 * third.nbytes


@pytest.mark.parametrize(("limit", "captured"), [(PAGE - 1, 0), (PAGE, 0), (3 * PAGE, 1)])
def test_the_memory_behind_addresses_counts(
    case: Case, monkeypatch: pytest.MonkeyPatch, limit: int, captured: int
) -> None:
    mapped: list[int] = []
    aliased = case.recorder.driver.aliased

    def noted(size: int, memory: int, device: int) -> Any:
        mapped.append(memory)
        return aliased(size, memory, device)

    monkeypatch.setattr(case.recorder.driver, "aliased", noted)
    case.recorder.memory_bytes = limit
    weight = case.allocator.tensor(torch.zeros(stand_ins.ALIASED_FROM // 4))
    run = case.made(twice, READ_ONLY)
    for _ in range(3):
        assert run([weight])[0].tolist() == [0, 0]

    case.expect(captured=captured)
    assert (refusal_of(run) == OVER_LIMIT) == (not captured)
    assert mapped == [PAGE] * (0 if limit < PAGE else 1 + captured)
    assert case.emulator.live_memory() == 0
