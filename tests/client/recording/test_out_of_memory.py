"""Out of memory wherever recording may run into it: the call is right, nothing of the recording stays, and the next process may try again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.recording import builder, stand_ins, verification
from pygraphd.client.recording.capture import Capture
from pygraphd.client.replay.replay import Replay
from tests.support.recording_case import Case, HostRecorder, add
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.client.recording.recordings import Recordings
    from tests.support.emulator import Allocator, Emulator

pytestmark = pytest.mark.torch

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB."

PLACES: dict[str, tuple[Any, str]] = {
    "stand-ins": (stand_ins, "stand_ins_for"),
    "capture": (HostRecorder, "capture"),
    "slots": (builder, "_build"),
    "allocator": (builder, "replay_device"),
    "old memory": (Capture, "memory"),
    "copies": (verification, "copies_of"),
    "memory": (verification, "_with_guard_blocks"),
    "trial": (Replay, "serve_on"),
}


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def full(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError(f"{FULL} GPU 0 has a total capacity of 80 GiB.\nA second line.")


def call(case: Case, run: Recordings, times: int = 1) -> None:
    for i in range(times):
        assert run([case.floats(i), case.floats(2)])[0].tolist() == [i + 2]


def expect_nothing_left(case: Case, before: tuple[int, int]) -> None:
    assert case.emulator.live() == before
    assert all(cursor.closed for cursor in case.recorder.cursors)
    assert all(recording.released for recording in case.recorder.recordings)


@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_cannot_be_recorded_runs_as_kernels(
    case: Case, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = case.make(add)
    call(case, run)
    before = case.emulator.live()
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place], full)
        call(case, run)

    expect_nothing_left(case, before)
    call(case, run, 3)
    case.expect(captured=0)
    refusal = refusal_of(run) or ""
    assert refusal.startswith(FULL)
    assert not run.refused_for_good
    assert case.report.fallbacks[refusal] == 4


def test_it_may_happen_in_the_middle_of_a_capture(case: Case) -> None:
    def body(operations: Any, inputs: list[Any]) -> Any:
        result = operations.add(inputs[0], inputs[1])
        return (result,) if operations is case.recorder.as_kernels else full()

    run = case.make(body)
    before = case.emulator.live()

    call(case, run, 4)

    expect_nothing_left(case, before)
    assert str(refusal_of(run)).startswith(FULL)
    assert not run.refused_for_good


def test_a_recording_that_cannot_be_compared_is_not_used(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.make(add)
    before = case.emulator.live()
    monkeypatch.setattr(verification, "compare", full)

    call(case, run, 5)

    expect_nothing_left(case, before)
    case.expect(captured=0)
    assert any(FULL in reason for reason in case.report.fallbacks)
