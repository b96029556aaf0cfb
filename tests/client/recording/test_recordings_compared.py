"""What a recording gives is compared with the call as KERNELS, and whatever differs is told."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.recording import comparison, recordings, verification
from pygraphd.client.recording.comparison import ALL_NAN, is_any_all_nan
from tests.support.recording_case import Case, Operations, Recording, add, case, is_transient
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch


def test_an_output_that_differs_is_told_and_the_call_returns_the_right_one(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        extra = case.floats(1, 1) if operations is case.recorder.as_kernels else case.floats(1, 2)
        return operations.add(inputs[0], inputs[0]), operations.add(inputs[0], extra)

    run = case.make(body)

    results = [run([case.floats(i, i)])[1].tolist() for i in range(4)]

    assert results == [[i + 1.0] * 2 for i in range(4)]
    case.expect(captured=0)
    assert (refusal_of(run) or "").startswith("verification: output 1 differs")
    assert run.refused_for_good
    told = {each: n for each, n in case.report.fallbacks.items() if each.startswith("verification")}
    assert sum(told.values()) == 3
    assert case.recorder.captures == 2


def looking_up(operations: Operations, inputs: list[Any]) -> Any:
    return operations.look_up(inputs[1]), operations.add(inputs[0], inputs[0])


def test_a_recording_that_disagrees_by_chance_is_made_once_more(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a kernel that adds in an order of its own decides which of two is the largest."""
    run, compare = case.make(add), comparison.compare
    verdicts = [comparison.Disagreement("output 0 differs", in_values=True)]
    monkeypatch.setattr(verification, "compare", lambda *each: verdicts.pop() if verdicts else compare(*each))

    for i in range(5):
        assert run([case.floats(i), case.floats(1), case.floats(7)])[0].tolist() == [i + 1]

    case.expect(captured=1)
    assert refusal_of(run) is None


def test_what_has_agreed_may_disagree_by_chance_when_it_is_recorded_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, compare = case.make(add), comparison.compare
    verdicts: list[comparison.Disagreement] = []
    monkeypatch.setattr(verification, "compare", lambda *each: verdicts.pop() if verdicts else compare(*each))

    for _ in range(3):
        verdicts.append(comparison.Disagreement("output 0 differs", in_values=True))
        for i in range(5):
            assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]
        run._drop(run._slots[()])

    case.expect(captured=3)


def test_what_stands_in_for_an_index_holds_other_indices(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run, index, others = case.make(add), torch.arange(8), verification.other_indices
    given: list[torch.Tensor] = []

    def noted(indices: torch.Tensor) -> torch.Tensor:
        given.append(indices)
        return others(indices)

    monkeypatch.setattr(verification, "other_indices", noted)
    for i in range(3):
        assert run([case.floats(i), case.floats(1), index])[0].tolist() == [i + 1]

    assert [each is index for each in given] == [True]
    case.expect(captured=1)


def test_what_disagrees_otherwise_each_time_may_agree_in_the_next_process(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = case.make(add)
    outputs = iter(range(100))
    differs = lambda *_: comparison.Disagreement(f"output {next(outputs)} differs", in_values=True)  # noqa: E731
    monkeypatch.setattr(verification, "compare", differs)

    for i in range(6):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    assert (refusal_of(run), run.refused_for_good) == ("verification: output 1 differs", False)
    assert case.recorder.captures == 2


def test_what_differs_at_the_same_place_twice_is_refused_for_good(case: Case) -> None:
    values = itertools.count()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.look_up(inputs[1]), operations.add(inputs[0], case.floats(next(values)))

    run = case.make(body)
    for i in range(8):
        run([case.floats(i), case.floats(i)])

    case.expect(captured=0)
    assert case.recorder.captures == 2
    assert run.refused_for_good


def test_memory_that_is_short_while_results_are_compared_refuses_nothing_for_good(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = case.make(looking_up)
    with monkeypatch.context() as patch:
        patch.setattr(verification, "compare", full)
        for i in range(3):
            assert run([case.floats(1), case.floats(i)])[0].tolist() == [i]

    assert (refusal_of(run), run.refused_for_good) == ("verification failed: CUDA out of memory", False)
    assert is_transient(run)
    case.expect(captured=0)


@pytest.mark.parametrize("values", [itertools.count(), itertools.cycle([1.0, -1.0])], ids=["counter", "mask"])
def test_what_the_host_hands_in_at_each_call_is_not_frozen(case: Case, values: Iterator[float]) -> None:
    """A recording would go on with the value that it was made with, as of a seed of the host's."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], case.floats(next(values))),)

    run = case.make(body)
    results = [run([case.floats(10)])[0].item() for _ in range(12)]

    assert len(set(results[-4:])) > 1
    case.expect(captured=0)
    assert run.refused_for_good


@pytest.mark.parametrize("undefined", [frozenset({1}), frozenset[int](), frozenset({0})])
def test_an_output_that_holds_nothing_needs_not_agree(case: Case, undefined: frozenset[int]) -> None:
    """Attention's seed may lie where a temporary lay: a recording leaves that there, a call as KERNELS what lay there before."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if isinstance(operations, Recording):
            temporary = operations.arena.allocate(4)
            operations.graph.set(temporary, 7)
            operations.arena.free(temporary)
            return used, operations.arena.allocate(4).view(torch.int64)
        return used, torch.tensor([12345, 8])

    run = case.make(body, undefined)
    for _ in range(4):
        run([case.floats(1, 1)])

    case.expect(captured=1 in undefined)
    assert refusal_of(run) == (
        None if 1 in undefined else "verification: output 1 differs in 100 % of its elements"
    )


def test_an_output_that_holds_nothing_has_its_form_all_the_same(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if isinstance(operations, Recording):
            return used, operations.arena.allocate(4)
        return used, case.floats(1, 2, 3)

    run = case.make(body, frozenset({1}))
    for _ in range(4):
        run([case.floats(1, 1)])

    assert (refusal_of(run) or "").startswith("verification: output 1 differs")


def test_a_seed_that_is_written_unseen_must_agree(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if not isinstance(operations, Recording):
            return used, torch.ones(1, dtype=torch.int64)
        seed = operations.arena.allocate(2)
        operations.hide(seed)
        operations.accumulate(seed, inputs[0])
        return used, seed.view(torch.int64)

    run = case.make(body)
    for _ in range(4):
        run([case.floats(1, 1)])

    assert refusal_of(run) == "verification: it writes to where it was recorded"


def test_an_input_that_is_read_unseen_beside_a_node_that_shows_it_is_told(case: Case) -> None:
    """The recorded addresses still hold what the inputs held: only poison there shows it."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.look_up(inputs[0]), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    results = [run([case.floats(i, i)])[0].tolist() for i in range(4)]

    assert results == [[float(i)] * 2 for i in range(4)]
    assert (refusal_of(run) or "").startswith("verification: output 0 differs")


def test_a_write_that_is_unseen_is_told_and_does_not_reach_the_users_tensor(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if isinstance(operations, Recording):
            operations.hide(inputs[0])
        operations.accumulate(inputs[0], inputs[1])
        return (operations.add(inputs[0], inputs[1]),)

    run = case.make(body)
    total = case.floats(0, 0)
    for count in range(1, 5):
        run([total, case.floats(1, 2)])
        assert total.tolist() == [count, 2 * count]

    assert refusal_of(run) == "verification: it writes to where it was recorded"


def test_a_temporary_that_is_written_and_read_unseen_is_told(case: Case) -> None:
    """Every result is right until its memory belongs to somebody else."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if not isinstance(operations, Recording):
            return case.floats(2, 2), operations.add(inputs[0], inputs[0])
        temporary = operations.arena.allocate(2)
        operations.hide(temporary)
        return operations.look_up(temporary), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    for _ in range(4):
        assert run([case.floats(1, 1)])[0].tolist() == [2, 2]

    assert refusal_of(run) == "verification: it writes to where it was recorded"


def test_an_output_that_is_written_where_nobody_looks_is_told(case: Case) -> None:
    """Memory that is zero already does not make up for it."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if isinstance(operations, Recording):
            return used, operations.arena.allocate(2)
        return used, case.floats(0, 0)

    run = case.make(body)
    for _ in range(4):
        run([case.floats(1, 1)])

    assert (refusal_of(run) or "").startswith("verification: output 1 differs")


def test_an_input_that_is_changed_otherwise_is_told(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        if operations is case.recorder.as_kernels:
            operations.accumulate(inputs[0], inputs[1])
        return (operations.add(inputs[1], inputs[1]),)

    run = case.make(body)
    total = case.floats(0, 0)

    for _ in range(4):
        run([total, case.floats(1, 1)])

    assert total.tolist() == [8, 8]
    assert (refusal_of(run) or "").startswith("verification: input 0 differs")


def test_other_random_numbers_are_told(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is case.recorder.as_kernels:
            case.recorder.generator.offset += 4
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(4):
        run([case.floats(1, 1)])

    assert refusal_of(run) == "verification: it draws another number of random numbers"
    assert case.recorder.generator.offset == 16


def test_an_output_in_memory_that_each_call_would_overwrite_is_told(case: Case) -> None:
    memory = case.floats(5, 5)

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.foreign(memory), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    for _ in range(4):
        assert run([case.floats(1, 1)])[0].tolist() == [5, 5]

    assert refusal_of(run) == "verification: output 0 lies in memory that relocation does not know"


def test_a_not_a_number_is_as_good_as_another(case: Case) -> None:
    run = case.make(add)

    for _ in range(3):
        run([case.floats(float("nan"), float("inf")), case.floats(1, 2)])

    case.expect(captured=1)


@pytest.mark.parametrize("first", [1.0, float("nan")])
def test_a_wrong_address_does_not_hide_behind_results_that_are_not_a_number(case: Case, first: float) -> None:
    """An address in a table is not found. Poison is read there, which is NaN, as the results of an overflowing step are."""
    run = case.make(lambda operations, inputs: (operations.look_up(inputs[0]),))
    for _ in range(3):
        run([case.floats(first, first)])
    for value in range(1, 40):
        assert run([case.floats(value, value)])[0].tolist() == [value, value]

    case.expect(captured=0)
    assert refusal_of(run) == "verification: output 0 differs in where it has NaN or infinity"


def test_a_recording_whose_results_were_nan_is_made_again_once_they_are_numbers(case: Case) -> None:
    run = case.make(add)
    for value in [float("nan")] * 4 + [1.0] * 13:
        run([case.floats(value, value), case.floats(1, 1)])
    assert (case.report.counts["captured"], is_transient(run)) == (0, True)
    for _ in range(10):
        run([case.floats(1, 1), case.floats(1, 1)])

    case.expect(captured=1)
    assert case.report.fallbacks == {recordings.NOT_YET: 1, ALL_NAN: 16}


@pytest.mark.parametrize("written", [frozenset[int](), frozenset({2})], ids=["left as it is", "written"])
def test_an_input_that_is_returned_may_be_no_number_unless_the_graph_writes_it(
    case: Case, written: frozenset[int]
) -> None:
    """As a mask that a model hands on: nobody computes it, so that no wrong address hides behind it."""
    run = case.made(
        lambda operations, inputs: (operations.add(*inputs[:2]), inputs[2]), GraphFacts(written=written)
    )
    nan = case.floats(float("nan"), float("nan"))
    for value in range(4):
        outputs = run([case.floats(value, value), case.floats(1, 1), nan])
        assert outputs[0].tolist() == [value + 1, value + 1]
        assert outputs[1] is nan

    case.expect(captured=int(not written))
    assert bool(case.report.fallbacks[ALL_NAN]) is bool(written)


@pytest.mark.parametrize(
    ("outputs", "undefined", "found"),
    [
        ([torch.tensor([float("nan")] * 3)], (), True),
        ([torch.tensor([float("nan")] * 3)], (0,), False),
        ([torch.tensor([float("nan"), float("nan"), 1.0])], (), False),
        ([torch.ones(3), None, torch.full((2, 3), float("nan"), dtype=torch.float16)], (), True),
        ([torch.ones(3), torch.full((2, 3), float("inf")), torch.zeros(0)], (), False),
        ([torch.full((4, 4), float("nan")).t()[1:], 1], (), True),
        ([torch.full((2,), complex("nan+nanj")), torch.ones(1, dtype=torch.int64)], (), True),
        ([torch.full((2,), complex("nan+nanj")).conj()], (), True),
        ([torch.full((2,), float("nan")).to(torch.float8_e5m2)], (), False),
        ([], (), False),
    ],
)
def test_which_results_are_nan_throughout(
    outputs: list[Any], undefined: tuple[int, ...], found: bool
) -> None:
    assert is_any_all_nan(outputs, undefined) is found
