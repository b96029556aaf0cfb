"""A capture's allocations are addresses over aliased memory, which are there until its replay is verified."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.recording.aliased_memory import AliasedMemory
from pygraphd.client.recording.capture import AddressesError
from pygraphd.client.recording.recordings import NOT_YET
from pygraphd.client.recording.verification import Verification
from pygraphd.client.replay.relocation_table import PAGE
from tests.support.recording_case import Case, Recording, add, case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from pygraphd.client.recording.capture import Capture
    from pygraphd.client.replay.native.ffi import TensorOps
    from tests.support.emulator import Emulator
    from tests.support.recording_case import Operations

__all__ = ["case"]  # a fixture
pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


@pytest.fixture
def aliased(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[Capture]:
    """Have captures get addresses only; returns what is captured."""
    captures: list[Capture] = []
    capture = case.recorder.capture

    def noted(*arguments: Any, **named: Any) -> Capture:
        captures.append(capture(*arguments, **named))
        return captures[-1]

    case.recorder.addresses = 64 * PAGE
    monkeypatch.setattr(case.recorder, "capture", noted)
    return captures


def test_addresses_are_handed_out_from_front_to_back(loaded_helper: TensorOps) -> None:
    allocate = ALLOCATE(loaded_helper.arena_functions()[0])
    loaded_helper.arena_range(PAGE, 5 * PAGE)
    try:
        assert [allocate(size, 0, None) for size in (1, PAGE + 1, 0, 2 * PAGE, PAGE, 1)] == [
            PAGE, 2 * PAGE, None, None, 4 * PAGE, None,
        ]  # fmt: skip
    finally:
        assert loaded_helper.arena_range(0, 0) == 5 * PAGE
    assert allocate(1, 0, None) is None


def test_a_replay_is_verified_without_the_pool_of_its_capture(
    case: Case, aliased: list[Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    init = Verification.__init__

    def noted(verification: Verification, *arguments: Any, **named: Any) -> None:
        released.append(case.recorder.recordings[-1].released)
        init(verification, *arguments, **named)

    monkeypatch.setattr(Verification, "__init__", noted)
    run = case.make(add)
    for value in range(4):
        assert run([case.floats(value, 1), case.floats(1, 2)])[0].tolist() == [value + 1, 3]

    assert released == [True]
    assert [each.addresses is not None for each in aliased] == [True]
    case.expect(captured=1)
    assert case.emulator.live_memory() == 0


def test_a_further_capture_has_other_addresses(case: Case, aliased: list[Capture]) -> None:
    released: list[list[bool]] = []
    case.recorder.between = lambda: released.append([each.released for each in case.recorder.recordings])
    run = case.make(lambda operations, inputs: (operations.first(inputs[0], 2),))
    for value in range(4):
        assert run([case.floats(value, 1, 2)])[0].tolist() == [value, 1]

    assert released == [[], [True]]
    first, second = (each.spans[0] for each in aliased)
    assert first.end <= second.start or second.end <= first.start
    case.expect(captured=1)


@pytest.mark.parametrize("node", ["copy", "memset"])
def test_a_copy_or_memset_is_replayed_on_memory_that_is_allocated(
    case: Case, aliased: list[Capture], node: str
) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.number(inputs[0]) if node == "copy" else operations.random()[0],)

    run = case.make(body)
    values = [case.allocator.tensor(torch.tensor(value)) for value in (8, 16)]
    results = [run([values[call % 2]])[0].item() for call in range(6)]

    assert results == ([8, 16] * 3 if node == "copy" else [4, 8, 12, 16, 20, 24])
    assert [each.addresses is not None for each in aliased] == [True]
    assert case.report.fallbacks == {NOT_YET: 1}
    case.expect(captured=1)


@pytest.mark.usefixtures("aliased")
@pytest.mark.parametrize("what", ["reads", "writes"])
def test_a_missed_address_of_the_capture_is_found(case: Case, what: str) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        made = operations.add(inputs[0], inputs[0])
        if isinstance(operations, Recording) and what == "writes":
            operations.hide(made)
        return made, operations.look_up(made) if what == "reads" else operations.add(made, made)

    run = case.make(body)
    for _ in range(6):
        assert run([case.floats(1, 2)])[0].tolist() == [2, 4]

    case.expect(captured=0)
    found = "output 1 differs" if what == "reads" else "it writes to where it was recorded"
    assert (refusal_of(run) or "").startswith(f"verification: {found}")


@pytest.mark.parametrize(
    "error",
    [
        AddressesError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("operation not permitted when stream is capturing"),
    ],
    ids=["it stays in place", "too few", "of another kind"],
)
def test_where_addresses_do_not_do_the_capture_gets_memory(
    case: Case, aliased: list[Capture], monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    capture = case.recorder.capture

    def fails(*arguments: Any, **named: Any) -> Capture:
        if named["addresses"] is not None:
            raise error
        return capture(*arguments, **named)

    monkeypatch.setattr(case.recorder, "capture", fails)
    run = case.make(add)
    for value in range(4):
        assert run([case.floats(value, 1), case.floats(1, 2)])[0].tolist() == [value + 1, 3]

    assert [each.addresses for each in aliased] == [None]
    case.expect(captured=1)
    assert case.emulator.live_memory() == 0


def test_no_address_beyond_the_range_is_handed_out(emulator: Emulator, loaded_helper: TensorOps) -> None:
    memory = AliasedMemory(emulator.driver, CPU, 2 * PAGE, 1)
    memory.take(PAGE)
    with pytest.raises(torch.OutOfMemoryError):
        memory.take(PAGE + 1)
    assert memory.free.size == PAGE
    memory.close()

    loaded_helper.arena_range(6 * PAGE, 5 * PAGE)
    try:
        assert ALLOCATE(loaded_helper.arena_functions()[0])(1, 0, None) is None
    finally:
        loaded_helper.arena_range(0, 0)
