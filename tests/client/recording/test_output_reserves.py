"""Each storage of a call's outputs is an allocation of its own, of the size that it has in a call as KERNELS."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.recording.aliased_memory import AliasedMemory
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.output_reserves import (
    BACKED_FROM,
    OutputReserve,
    OutputReserves,
    backing_for,
    reserves_for,
)
from pygraphd.client.replay.relocation_table import BLOCK, PAGE, Span, merge
from tests.support.recording_case import Case, case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.emulator import Allocator, Emulator
    from tests.support.recorder import Recorder
    from tests.support.recording_case import Operations

__all__ = ["case"]  # a fixture
pytestmark = pytest.mark.torch


def storages(outputs: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return of each output the number of its storage, that storage's bytes, and where in it the output begins."""
    numbers: dict[int, int] = {}
    told = []
    for each in outputs:
        storage = each.untyped_storage()
        number = numbers.setdefault(storage.data_ptr(), len(numbers))
        told.append((number, storage.nbytes(), each.storage_offset()))
    return told


def where_a_temporary_was(operations: Operations, inputs: list[Any]) -> Any:
    """Two outputs of Inductor's code where a larger temporary was, and one of a library's where another one was."""
    large = operations.add(inputs[0], inputs[0])
    used = operations.first(large, 4)
    operations.done(large)
    first = operations.add(used, used)
    second = operations.add(first, used)
    other = operations.until(inputs[0])
    few = operations.first(other, 4)
    operations.done(other)
    return first, second, operations.until(few)


def test_outputs_where_temporaries_were_have_storages_of_their_own(case: Case) -> None:
    run = case.make(where_a_temporary_was)
    of_kernels = run([case.floats(*range(300))])
    assert storages(of_kernels) == [(0, 16, 0), (1, 16, 0), (2, 16, 0)]

    kept = [run([case.floats(*range(begin, begin + 300))]) for begin in range(6)]

    for begin, outputs in enumerate(kept):
        values = torch.arange(begin, begin + 4.0)
        assert [each.tolist() for each in outputs] == [(factor * values).tolist() for factor in (4, 6, 4)]
        assert storages(outputs) == storages(of_kernels)
        assert all(each.data_ptr() % BLOCK == 0 for each in outputs)
        assert not any(each._is_view() or each.requires_grad for each in outputs)
    everything = [each.data_ptr() for outputs in kept for each in outputs]
    assert len(set(everything)) == len(everything)
    case.expect(captured=1)


class OfASum(torch.autograd.Function):  # type: ignore[misc]
    """A function of the sum of two parameters: compiled code returns one tensor as the gradient of both."""

    @staticmethod
    def forward(
        ctx: Any, first: torch.Tensor, second: torch.Tensor, run: Any, x: torch.Tensor
    ) -> torch.Tensor:
        ctx.run, ctx.x = run, x
        return first + second

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        first, second = ctx.run([ctx.x])
        return first, second, None, None


def the_same_twice(operations: Operations, inputs: list[Any]) -> Any:
    result = operations.add(inputs[0], inputs[0])
    return result, result


def the_same_of_a_library_twice(operations: Operations, inputs: list[Any]) -> Any:
    large = operations.add(inputs[0], inputs[0])
    used = operations.first(large, 4)
    operations.done(large)
    result = operations.until(operations.first(used, 4))  # where a temporary was: copied to its reserve
    return result, result


@pytest.mark.parametrize("body", [the_same_twice, the_same_of_a_library_twice])
@pytest.mark.parametrize("has_addresses", [False, True])
def test_parameters_whose_gradient_is_one_tensor_get_one_each(
    case: Case, body: Any, has_addresses: bool
) -> None:
    case.recorder.addresses = 64 * PAGE * has_addresses
    run = case.made(body, GraphFacts(written=frozenset()))
    x = case.floats(*[0.25] * 300)
    few = len(body(case.recorder.as_kernels, [x])[0])
    first, second = (torch.zeros(few, requires_grad=True) for _ in "ab")
    expected = 0.0

    for _ in range(6):
        OfASum.apply(first, second, run, x).sum().backward()
        expected += float(body(case.recorder.as_kernels, [x])[0][0])
        assert first.grad is not None
        assert second.grad is not None
        assert (first.grad.tolist(), second.grad.tolist()) == ([expected] * few, [expected] * few)
        torch._foreach_mul_([first.grad, second.grad], 0.5)  # as clipping does
        expected *= 0.5

    case.expect(captured=1)


def test_a_tensor_that_is_given_and_returned_twice_is_no_difference(case: Case) -> None:
    """As a gradient that autograd hands to two outputs. The copies of a verification are two."""
    run = case.made(
        lambda operations, inputs: (operations.add(inputs[0], inputs[1]), *inputs), GraphFacts(written=None)
    )
    for _ in range(4):
        x = case.floats(1, 2)
        total, first, second = run([x, x])
        assert (total.tolist(), first is x, second is x) == ([2, 4], True, True)

    case.expect(captured=1)


def test_a_recording_that_returns_two_tensors_for_one_is_refused(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        result = operations.add(inputs[0], inputs[0])
        if operations is case.recorder.as_kernels:
            return result, result
        return result, operations.add(inputs[0], inputs[0])

    run = case.make(body)
    for _ in range(6):
        first, second = run([case.floats(1, 2)])
        assert first is second

    case.expect(captured=0)
    assert refusal_of(run) == "verification: outputs that are one tensor are several"


def test_what_lies_apart_is_captured_once(case: Case) -> None:
    run = case.make(
        lambda operations, inputs: (operations.add(inputs[0], inputs[0]), operations.until(inputs[0]))
    )

    for _ in range(4):
        run([case.floats(1, 2)])

    case.expect(captured=1)
    assert case.recorder.captures == 1


def test_only_what_a_library_has_allocated_is_copied(case: Case) -> None:
    run = case.make(where_a_temporary_was)
    for _ in range(3):
        run([case.floats(*range(300))])

    first, second, *_ = case.recorder.reserves

    assert first == ()
    assert case.recorder.emptied_before == [
        0,
        3,
    ]  # once for all captures of the call, and before the first replay
    assert case.recorder.cleared_before == [0]  # a workspace would keep its segment
    assert {room.outputs: room.allocation for room in second} == {(0,): 1, (1,): 2, (2,): None}


def test_captures_with_rooms_are_cut_from_as_much_as_the_first_has_used(case: Case) -> None:
    """And a quarter more; the first one of a call that needs no other goes without."""
    run = case.make(where_a_temporary_was)

    for _ in range(3):
        run([case.floats(*range(300))])

    first, second, *_ = case.recorder.backings
    used = case.recorder.recordings[0].arena.allocations
    assert (first, second) == (0, sum(span.size for span in merge(used)) * 5 // 4)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "until", "first", "done"]), st.integers(0, 20), st.integers(0, 20)),
    min_size=1,
    max_size=14,
)
RETURNED = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from(["whole", "head", "tail", "turned"])),
    min_size=1,
    max_size=6,
)
FORMS = {
    "whole": lambda each: each,
    "head": lambda each: each[:2],
    "tail": lambda each: each[1:],
    "turned": lambda each: each[:4].view(2, 2).t(),
}


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    steps=STEPS,
    returned=RETURNED,
    sizes=st.lists(st.sampled_from([4, 100, 130, 300]), min_size=2, max_size=2),
)
def test_whatever_dies_before_storages_are_those_of_a_call_as_kernels(
    emulator: Emulator, allocator: Allocator, steps: list[Any], returned: list[Any], sizes: list[int]
) -> None:
    """Outputs may be parts of one storage, inputs, or parts of these."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        values, outlive = list(inputs), 2
        operations.add(inputs[0], inputs[0])  # what launches nothing is not recorded
        for kind, x, y in steps:
            a, b = values[x % len(values)], values[y % len(values)]
            n = min(len(a), len(b))
            if kind == "add":
                values.append(operations.add(a[:n], b[:n]))
            elif kind == "until":
                values.append(operations.until(a))
            elif kind == "first":
                values.append(operations.first(a, 4))
            elif len(values) > outlive + 1:
                operations.done(values.pop(2 + x % (len(values) - 2)))
        return tuple(FORMS[form](values[number % len(values)]) for number, form in returned)

    case = Case(emulator, allocator)
    run = case.make(body)
    for number in range(4):
        inputs = [case.allocator.tensor(torch.arange(float(n)) + number) for n in sizes]
        of_kernels = body(case.recorder.as_kernels, inputs)
        told = [each.untyped_storage().data_ptr() for each in inputs]

        outputs = run(list(inputs))

        assert all(map(torch.equal, outputs, of_kernels))
        assert storages(outputs) == storages(of_kernels)
        for mine, right in zip(outputs, of_kernels, strict=True):
            assert (mine.size(), mine.stride()) == (right.size(), right.stride())
            of_input = right.untyped_storage().data_ptr()
            assert (of_input in told) == (mine.untyped_storage().data_ptr() in told)
    assert refusal_of(run) is None
    case.expect(captured=1)
    case.close()


# --- output reserves -------------------------------------------------------------------------------------------------------


def test_a_room_is_made_at_the_allocation_that_made_the_storage_last(recorder: Recorder) -> None:
    """Others began there before, and were let go of."""
    out = recorder.arena.allocate(2)
    allocations = (Span(out.data_ptr(), out.data_ptr() + 4000), *recorder.arena.allocations)
    capture = Capture(
        recorder.graph.handle, [out[1:], out], allocations, allocated=(out.data_ptr(), 77, out.data_ptr())
    )

    assert reserves_for(capture) == (OutputReserve(8, (0, 1), 2),)
    recorder.emulator.driver.destroy_graph(capture.graph)


def test_in_the_last_capture_every_output_has_a_room(recorder: Recorder) -> None:
    lone, out = recorder.arena.allocate(2), recorder.arena.allocate(2)
    allocations = (*recorder.arena.allocations, Span(out.data_ptr(), out.data_ptr() + 4000))
    capture = Capture(recorder.graph.handle, [lone, None, 5, out], allocations)

    assert reserves_for(capture) == (OutputReserve(8, (3,), None),)
    assert reserves_for(capture, for_all=True) == (OutputReserve(8, (0,), None), OutputReserve(8, (3,), None))
    recorder.emulator.driver.destroy_graph(capture.graph)


def test_rooms_are_handed_out_in_turn_and_what_is_elsewhere_is_copied() -> None:
    rooms = OutputReserves((OutputReserve(16, (0, 2), 1), OutputReserve(20, (1,), None)), torch.device("cpu"))
    rooms.begin()
    asked = Counter[tuple[int, ...]]()

    def original(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked[size] += 1
        return torch.empty_strided(size, stride, dtype=dtype)

    temporary = rooms.allocate(original, (2, 2), (2, 1), torch.float32)
    made = rooms.allocate(original, (2, 2), (2, 1), torch.float32).fill_(3)
    library = torch.arange(5.0)[1:].view(2, 2).t()

    outputs = rooms.place((made, library, made[1], 7))

    assert asked == {(2, 2): 1}
    assert rooms.allocated == [temporary.data_ptr(), made.data_ptr()]
    assert isinstance(outputs, tuple)
    assert outputs[0] is made
    assert outputs[3] == 7
    assert storages((outputs[0], outputs[2])) == [(0, 16, 0), (0, 16, 2)]
    assert torch.equal(outputs[1], library)
    assert storages(outputs[1:2]) == [(0, 20, 1)]
    assert outputs[1].stride() == (1, 2)
    assert outputs[1].data_ptr() != library.data_ptr()


def test_what_needs_another_size_than_a_room_has_gets_memory_of_its_own() -> None:
    """As a temporary does that lay where a library's output lies afterwards; a storage must not be resized for it."""
    rooms = OutputReserves((OutputReserve(16, (0,), 0),), torch.device("cpu"))
    rooms.begin()

    large = rooms.allocate(
        lambda *form: torch.empty_strided(*form[:2], dtype=form[2]), (3, 2), (2, 1), torch.float32
    )
    (out,) = rooms.place((torch.ones(4),))

    assert storages([large, out]) == [(0, 24, 0), (1, 16, 0)]
    assert out.tolist() == [1] * 4
    with pytest.raises(NotRelocatableError, match="other storages"):
        rooms.place((torch.ones(3),))


def test_without_rooms_outputs_are_what_was_returned() -> None:
    outputs = [torch.ones(1)]

    assert OutputReserves((), torch.device("cpu")).place(outputs) is outputs


# --- the backing allocation --------------------------------------------------------------------------------------------------


class Noting(OutputReserves):
    """Rooms of which it is known what was allocated, and what is gone."""

    def __init__(self, ground: int, has: int = 1 << 40) -> None:
        self.told: list[tuple[int, bool]] = []
        self._has, self._latest = has, weakref.ref(self)
        super().__init__((OutputReserve(16, (0,), 0),), torch.device("cpu"), (BLOCK,), ground)
        self.begin()

    def storage(self, size: int) -> torch.UntypedStorage:
        if size > self._has:
            raise torch.OutOfMemoryError
        made = torch.UntypedStorage(size)
        self.told.append((size, self._latest() is None))
        self._latest = weakref.ref(made)
        return made


def test_the_ground_is_allocated_first_and_is_free_for_what_comes_next() -> None:
    rooms = Noting(BACKED_FROM)

    assert rooms.told == [(BACKED_FROM, False), (BLOCK, True), (16, False)]
    assert rooms.before == 2


@pytest.mark.parametrize(
    ("ground", "has"),
    [
        (BACKED_FROM, BACKED_FROM - 1),
        (BACKED_FROM - 1, BACKED_FROM),
        (0, BACKED_FROM),
    ],
)
def test_without_a_ground_the_rooms_are_the_same(ground: int, has: int) -> None:
    """It cannot be had, or small tensors would lie in it."""
    rooms = Noting(ground, has)

    assert [size for size, _ in rooms.told] == [BLOCK, 16]
    assert rooms.before == 1


def test_the_ground_stays_as_large_and_what_stays_in_place_has_none() -> None:
    def ground(used: int, staying: int = 0, before: int = 0) -> int:
        held = (Span(4 * BACKED_FROM, 4 * BACKED_FROM + staying),)
        return backing_for(Capture(0, [], (Span(0, used),), held, backing=before))

    assert ground(1000) == 1250
    assert ground(1000, before=1500) == 1500
    assert ground(1000, staying=BACKED_FROM - 1) == 1250
    assert ground(1000, staying=BACKED_FROM, before=1500) == 0


@pytest.mark.parametrize("shifts", [(), (BLOCK, BACKED_FROM)])
def test_rooms_at_addresses_take_none_of_the_pool(emulator: Emulator, shifts: tuple[int, ...]) -> None:
    """Only what takes up addresses lies there, and the backing allocation, which is for temporaries."""
    told = list[int]()

    class Pooled(OutputReserves):
        def storage(self, size: int) -> torch.UntypedStorage:
            told.append(size)
            return torch.UntypedStorage(size)

    memory = AliasedMemory(emulator.driver, torch.device("cpu"), 4 * PAGE)
    start = memory.free.start + BLOCK * bool(shifts)
    wanted = (OutputReserve(16, (0,), 0), OutputReserve(BLOCK + 8, (1,), None))
    rooms = Pooled(wanted, torch.device("cpu"), shifts, 2 * BACKED_FROM, memory)
    after = memory.free.start
    rooms.begin()

    assert told == [2 * BACKED_FROM, *shifts]
    assert rooms.before == len(told)
    assert rooms.spans == (Span(start, start + 16), Span(start + BLOCK, start + 2 * BLOCK + 8))
    assert after == memory.free.start == start + 3 * BLOCK
    placed = rooms.place([torch.ones(4), torch.ones(BLOCK // 4 + 2)])
    assert [each.data_ptr() for each in placed] == [span.start for span in rooms.spans]
    rooms.close()
    del placed
    memory.close()
    temporary = Capture(0, [], (Span(0, 4000),), addresses=memory, temporary_bytes=1000)
    assert backing_for(temporary) == 1250
