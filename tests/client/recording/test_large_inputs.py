"""Large inputs are stood in for by addresses, and in verification only those are copied that the graph may write."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.recording import stand_ins, verification
from pygraphd.client.recording.alias_sets import input_groups
from pygraphd.client.recording.aliased_memory import AliasedMemory
from pygraphd.client.recording.stand_ins import RecordedCall
from pygraphd.client.replay.relocation_table import PAGE
from tests.support.recording_case import Case, Operations, Recording, case, is_transient
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from tests.support.emulator import Emulator

__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch

FLOATS = stand_ins.ALIASED_FROM // 4
READ_ONLY = GraphFacts(written=frozenset())


def weight(case: Case, value: float) -> torch.Tensor:
    return case.allocator.tensor(torch.full((FLOATS,), float(value)))


def head(operations: Operations, inputs: list[Any]) -> Any:
    return operations.first(inputs[0], 2), operations.add(inputs[1], inputs[1])


def test_addresses_share_little_memory_which_holds_what_is_written_to_any(emulator: Emulator) -> None:
    size = 40 << 30
    aliased = AliasedMemory(emulator.driver, torch.device("cpu"), size)
    one, other = aliased.take(size // 2), aliased.take(size // 2)

    assert (aliased.memory.nbytes, aliased.whole.nbytes) == (64 << 20, size)
    assert (one.untyped_storage().nbytes(), other.data_ptr() - one.data_ptr()) == (size // 2, size // 2)
    aliased.memory.fill_(-2)
    assert other[-8:].view(torch.int64).item() == -2
    one[:8].view(torch.int64).fill_(7)
    assert aliased.memory[0].item() == other[:8].view(torch.int64).item() == 7
    aliased.close()

    assert emulator.live_memory() == 0


@pytest.mark.parametrize("call", range(1, 8))
def test_a_range_that_cannot_be_had_or_given_back_leaves_nothing(emulator: Emulator, call: int) -> None:
    emulator.fail_at(call)

    with pytest.raises(DriverError):
        AliasedMemory(emulator.driver, torch.device("cpu"), 3 * PAGE).close()

    assert emulator.live_memory() == 0


def test_a_call_is_recorded_with_memory_for_its_small_inputs_only(case: Case) -> None:
    run, weights = case.made(head, READ_ONLY), weight(case, 3)
    case.recorder.free = 1 << 20

    for value in range(4):
        first, doubled = run([weights, case.floats(value, 1)])
        assert (first.tolist(), doubled.tolist()) == ([3, 3], [2 * value, 2])

    case.expect(captured=1)
    assert case.emulator.live_memory() == 0


def test_what_may_be_written_is_copied(case: Case) -> None:
    """Whether Inductor names it, or nothing is known of the graph; then there has to be memory for it."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0][:2], inputs[1])
        return ()

    for facts in (GraphFacts(written=frozenset({0})), GraphFacts()):
        run, total = case.made(body, facts), weight(case, 0)
        case.recorder.free = FLOATS * 4
        for _ in range(2):
            run([total, case.floats(1, 2)])
        case.recorder.free *= 2
        assert refusal_of(run) is not None
        run.close()
        again = case.made(body, facts)
        for _ in range(4):
            again([total, case.floats(1, 2)])
        assert total[:3].tolist() == [6, 12, 0]

    case.expect(captured=2)


def test_a_missed_address_of_a_large_input_reads_poison_and_ends_no_process(case: Case) -> None:
    """Also when the recording runs again, as it is to be known how much it differs from itself."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.look_up(inputs[0][FLOATS - 2 :]), *head(operations, inputs)

    run, weights = case.made(body, READ_ONLY), weight(case, 3)
    for value in range(3):
        assert run([weights, case.floats(value, value)])[0].tolist() == [3, 3]

    case.expect(captured=0)
    assert (refusal_of(run) or "").startswith("verification: output 0 differs")


def test_a_missed_write_to_a_large_input_shows_and_does_not_reach_it(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if isinstance(operations, Recording):
            operations.hide(inputs[0][FLOATS // 2 :][:2])
        return head(operations, inputs)

    run, weights = case.made(body, READ_ONLY), weight(case, 3)
    for value in range(4):
        run([weights, case.floats(value, 1)])

    assert refusal_of(run) == "verification: it writes to where it was recorded"
    assert bool((weights == 3).all())


def test_an_input_that_changes_though_it_is_only_read_is_told_at_once(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0][4096:][:2], inputs[1])
        return ()

    run = case.made(body, READ_ONLY)
    for value in range(4):
        run([weight(case, 3), case.floats(value, 1)])

    assert (refusal_of(run), run.refused_for_good) == (verification.WROTE_TO_INPUT, True)
    case.expect(captured=0, wrong_results=1)
    assert verification.WROTE_TO_INPUT in capsys.readouterr().err


def test_an_operator_that_asks_more_than_an_address_is_captured_on_memory(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if isinstance(operations, Recording) and not inputs[0].untyped_storage().resizable():
            raise RuntimeError("it cannot be resized")
        return (operations.first(inputs[0], 2),)

    run, weights = case.made(body, READ_ONLY), weight(case, 3)
    for _ in range(4):
        assert run([weights])[0].tolist() == [3, 3]

    case.expect(captured=1)
    assert case.recorder.captures == 3  # `first` has a structure, and so a second capture


def test_where_memory_cannot_be_mapped_stand_ins_have_memory(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Any:
        raise DriverError("cuMemCreate", 801)

    monkeypatch.setattr(case.recorder.driver, "aliased", refuse)
    run, weights = case.made(head, READ_ONLY), weight(case, 3)
    case.recorder.free = 4 * FLOATS
    run([weights, case.floats(0, 1)])
    run([weights, case.floats(1, 1)])
    case.expect(captured=0)

    case.recorder.free *= 2
    for value in range(40):
        run([weights, case.floats(value, 1)])
    case.expect(captured=1)


CACHE = GraphFacts(written=frozenset({0}))


def cache(case: Case, step: float = 1) -> torch.Tensor:
    numbers = torch.arange(stand_ins.ALIASED_COPY_FROM // 4 + 99, dtype=torch.float32)
    return case.allocator.tensor(step * numbers)


def test_a_cache_that_cannot_be_copied_is_verified_on_little_memory(case: Case) -> None:
    """And is written to by the user's calls only."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        end = inputs[0][-8:]
        operations.accumulate(end, inputs[1])
        return (operations.add(end, inputs[1]),)

    run, entries = case.made(body, CACHE), cache(case)
    ends = entries[-8:].clone()
    case.recorder.free = 10 << 20
    for value in range(1, 5):
        ends += value
        assert torch.equal(run([entries, case.floats(*[value] * 8)])[0], ends + value)
        assert torch.equal(entries[-8:], ends)

    assert torch.equal(entries[:-8], torch.arange(entries.numel() - 8, dtype=torch.float32))
    case.expect(captured=1)
    assert case.emulator.live_memory() == 0


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_wrong_recording_of_such_a_call_is_not_used(case: Case, is_hidden: bool) -> None:
    numbers = itertools.count()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if is_hidden and isinstance(operations, Recording):
            operations.hide(inputs[0][:2])
        operations.accumulate(inputs[0][:2], inputs[1] if is_hidden else case.floats(next(numbers), 1))
        return ()

    run, entries = case.made(body, CACHE), cache(case, 0)
    case.recorder.free = 10 << 20
    for _ in range(4):
        run([entries, case.floats(1, 1)])

    case.expect(captured=0)
    assert (refusal_of(run) or "").startswith(
        "verification: " + ("it writes to where" if is_hidden else "input 0 differs")
    )
    assert is_hidden or (is_transient(run) and case.recorder.captures == 1)
    assert entries[1].item() == 4


def test_aliased_copies_lie_side_by_side_and_begin_with_the_values_of_the_inputs(emulator: Emulator) -> None:
    caches = [
        torch.zeros(stand_ins.ALIASED_COPY_FROM // 4) for _ in range(20)
    ]  # never written pages take no memory
    for number, each in enumerate(caches):
        each[:9] = number
    inputs, cpu = [torch.zeros(4), *caches], torch.device("cpu")
    call = RecordedCall(
        inputs, stand_ins.NO_CONSTRAINTS, input_groups(inputs), emulator.driver, cpu, lambda *_: None
    )
    copies = call.aliased_copies(range(1, 20))
    assert copies is not None

    for _ in range(2):
        given = copies.among(inputs)
        assert given[0] is inputs[0]
        assert given[20] is inputs[20]
        assert all(mine.shape == each.shape for mine, each in zip(given, inputs, strict=True))
        assert [given[1][-1].item(), given[2][0].item()] == [0, 1]
        given[1].fill_(7)
        assert given[2][:9].tolist() == [1] * 9
        assert (given[19] == 7).any()
    left = copies.left(given, copies.memory)
    assert left[:2] == [inputs[0], left[1]]
    assert left[2:20] == [None] * 18
    assert copies.memory.nbytes == PAGE * stand_ins.prime_from(2 * 19)
    del given, left, copies
    call.close()


@pytest.mark.parametrize(("least", "prime"), [(0, 2), (2, 2), (4, 5), (800, 809)])
def test_the_next_prime_number_is_found(least: int, prime: int) -> None:
    assert stand_ins.prime_from(least) == prime


def test_a_graph_that_copies_from_an_aliased_copy_goes_on_with_the_input(case: Case) -> None:
    """The driver has an executable copy only between memory that is mapped as when it was made."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0][-8:], inputs[1])
        return (operations.number(inputs[0][:2].view(torch.int64)[0]),)

    run, entries = case.made(body, CACHE), cache(case)
    case.recorder.free = 10 << 20
    for value in range(1, 6):
        run([entries, case.floats(*[value] * 8)])

    case.expect(captured=1)
    assert refusal_of(run) is None
