"""What a forward saves for its backward lies side by side in few allocations; what others see has a storage of its own."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import BackwardFacts, GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import LayoutMismatch
from pygraphd.client.backend.torch_private.autograd import returned_outputs
from tests.support.recording_case import Case, case
from tests.support.user_program import Run
from tests.support.user_program import run as run_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.support.recording_case import Operations

__all__ = ["case", "run_program"]  # fixtures
pytestmark = pytest.mark.torch

COUNT = 12


def forward(operations: Operations, inputs: list[Any]) -> Any:
    """An output for the user, and then as many for the backward, of which the last is seen by the user, too."""
    made = [operations.add(inputs[0], inputs[0])]
    for _ in range(COUNT):
        made.append(operations.add(made[-1], inputs[0]))
    return (made[0], *made[1:], made[0])


def expect(outputs: Any, value: float) -> None:
    assert [each[0].item() for each in outputs] == [*(value * n for n in range(2, COUNT + 3)), value * 2]


def storages(outputs: Any) -> list[int]:
    return [each.untyped_storage().data_ptr() for each in outputs]


def made(case: Case) -> Any:
    return case.made(forward, GraphFacts(saved=frozenset(range(1, COUNT + 2))))


def test_what_is_saved_lies_side_by_side_and_what_the_user_sees_by_itself(case: Case) -> None:
    run = made(case)
    kept = [run([case.floats(float(n), 0.0)]) for n in range(1, 6)]

    for n, outputs in enumerate(kept, 1):
        expect(outputs, float(n))
        seen, *saved, seen_too = outputs
        assert storages([seen]) == storages([seen_too])
        assert seen.untyped_storage().nbytes() == seen.nbytes
        assert storages([seen])[0] not in storages(saved)
    replayed = kept[2:]
    assert all(len({*storages(each[1:-1])}) == 1 for each in replayed)
    assert len({address for each in replayed for address in storages(each[:2])}) == 2 * len(replayed)
    addresses = [each.data_ptr() for each in replayed[0]]
    assert len({*addresses}) == COUNT + 1  # the last is the first one again
    assert not any(each._is_view() for each in replayed[0])
    (replay,) = run.replays
    assert len(replay.layout.memories) == 2
    case.expect(captured=1)


def test_the_memory_of_what_is_saved_goes_with_the_last_of_it(case: Case) -> None:
    run = made(case)
    for n in range(1, 4):
        outputs = run([case.floats(float(n), 0.0)])
    kept = outputs[5]
    del outputs
    others = [run([case.floats(9.0, 0.0)]) for _ in range(3)]

    assert kept[0].item() == 3.0 * 7
    expect(others[-1], 9.0)


def give_back(saved: torch.Tensor) -> torch.Tensor:
    return saved


def test_where_hooks_see_what_is_saved_all_have_storages_of_their_own(case: Case) -> None:
    """One that moves what is saved elsewhere may give the storage back."""
    run = made(case)
    with torch.autograd.graph.saved_tensors_hooks(give_back, give_back):
        for n in range(1, 5):
            outputs = run([case.floats(float(n), 0.0)])
        expect(outputs, 4.0)
        assert len({*storages(outputs)}) == COUNT + 1
    expect(run([case.floats(5.0, 0.0)]), 5.0)
    case.expect(captured=1)


def test_hooks_that_come_later_see_what_kernels_have_made(case: Case) -> None:
    run = made(case)
    for n in range(1, 5):
        run([case.floats(float(n), 0.0)])
    with torch.autograd.graph.saved_tensors_hooks(give_back, give_back):
        outputs = run([case.floats(5.0, 0.0)])
    expect(outputs, 5.0)
    assert len({*storages(outputs)}) == COUNT + 1
    assert case.report.fallbacks[LayoutMismatch.HOOKS.value] == 1
    assert len({*storages(run([case.floats(6.0, 0.0)])[1:-1])}) == 1


def test_hooks_that_stay_have_it_recorded_anew_for_calls_with_and_without_them(case: Case) -> None:
    run = made(case)
    for n in range(1, 5):
        run([case.floats(float(n), 0.0)])
    with torch.autograd.graph.saved_tensors_hooks(give_back, give_back):
        for n in range(5, 9):
            outputs = run([case.floats(float(n), 0.0)])
            expect(outputs, float(n))
            assert len({*storages(outputs)}) == COUNT + 1
    expect(run([case.floats(9.0, 0.0)]), 9.0)

    (replay,) = run.replays
    assert replay.counts.replays >= 3
    case.expect(captured=2)
    assert case.report.fallbacks[LayoutMismatch.HOOKS.value] == 1


@pytest.mark.parametrize("size", [2, 3])
def test_what_may_become_a_gradient_has_a_storage_of_its_own(case: Case, size: int) -> None:
    """A backward may compute the gradient of an input of the same size in place there, and the program sees it."""
    run = made(case)
    for n in range(1, 5):
        other = case.floats(*[0.0] * size).requires_grad_()
        outputs = run([case.floats(float(n), 0.0), other])
    expect(outputs, 4.0)
    assert len({*storages(outputs)}) == (COUNT + 1 if size == 2 else 2)


@pytest.mark.parametrize(
    ("returned", "requires_grad", "storages_of_saved"),
    [
        (None, True, COUNT + 1),
        (frozenset({2}), True, COUNT + 1),
        (frozenset({2}), False, COUNT + 1),
        (frozenset({3}), True, 2),
    ],
)
def test_what_the_backward_is_known_not_to_return_becomes_no_gradient(
    case: Case, returned: frozenset[int] | None, *, requires_grad: bool, storages_of_saved: int
) -> None:
    """The backward may be compiled after the forward has run, but before it is recorded. The gradient may have another size."""
    backward = BackwardFacts()
    run = case.made(forward, GraphFacts(saved=frozenset(range(1, COUNT + 2)), backward=backward))
    for n in range(1, 5):
        other = case.floats(0.0, 0.0).requires_grad_(requires_grad)
        outputs = run([case.floats(float(n), 0.0), other])
        backward.returned_sizes = returned
    expect(outputs, 4.0)
    assert len({*storages(outputs)}) == storages_of_saved


@pytest.mark.parametrize("returned", [None, frozenset[int]()])
def test_a_size_that_is_saved_has_no_storage(case: Case, returned: frozenset[int] | None) -> None:
    """A forward of dynamic sizes saves them, too."""
    facts = GraphFacts(saved=frozenset({1, 2, 3}), backward=BackwardFacts(returned))

    def sized(operations: Operations, inputs: list[Any]) -> Any:
        return (*forward(operations, inputs)[:3], 2)

    run = case.made(sized, facts)
    for n in range(1, 5):
        first, *saved, size = run([case.floats(float(n), 0.0)])
        assert [each[0].item() for each in (first, *saved)] == [2.0 * n, 3.0 * n, 4.0 * n]
        assert size == 2
    assert len({*storages(saved)}) == 1
    case.expect(captured=1)


# --- which outputs these are --------------------------------------------------------------------------------------


@pytest.fixture
def facts() -> Iterator[list[torch_private.CompiledFacts]]:
    """Return the facts of all that is compiled, with a pass of ours."""
    seen: list[torch_private.CompiledFacts] = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        seen.append(torch_private.facts(compiled, graph_kwargs))
        original()

    undo = [
        torch_private.add_pass(lambda graph: None, (__file__,)),
        torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs)),
    ]
    torch._dynamo.reset()
    yield seen
    for each in undo:
        each()
    torch._dynamo.reset()


@pytest.mark.slow
def test_which_outputs_are_saved_is_known_from_inductors_caches_too(
    facts: list[torch_private.CompiledFacts], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y.add_(1)  # what it becomes is returned first, before the user's outputs
        base = x * 2
        return base[:2], (base.sin() @ base.cos()).relu()

    def run() -> list[frozenset[int]]:
        facts.clear()
        torch._dynamo.reset()
        x = torch.randn(4, 4, requires_grad=True)
        torch.compile(function)(x, torch.ones(3))[1].sum().backward()
        return [each.saved for each in facts]

    (forward, backward), again = run(), run()

    assert len(forward) == 3  # the sine, the cosine and which are positive
    assert min(forward) >= 2
    assert not backward
    assert again == [forward, backward]


def test_an_inference_saves_nothing(facts: list[torch_private.CompiledFacts]) -> None:
    with torch.no_grad():
        torch.compile(lambda x: (x.sin() @ x).relu())(torch.randn(4, 4))
    assert [each.saved for each in facts] == [frozenset()]


ALIKE = """
import json
import torch
from torch._inductor.output_code import CompiledFxGraph
from pygraphd.client.backend.torch_private.autograd import saved_outputs

found, post_compile = [], CompiledFxGraph.post_compile

def look(self, *given, **named):
    found.append(sorted(saved_outputs(self)))
    return post_compile(self, *given, **named)

CompiledFxGraph.post_compile = look

def saves(x, w, v, z):
    e = x @ x
    c = e @ x
    return e * w, c * v, z + 1

def returns(x, w, v, z):
    with torch.no_grad():
        e = x @ x
        c = e @ x
        r, q = e * w, c * v
    return r, q, z + 1, e, c

x, *others = (torch.randn(8, 8, requires_grad=needs) for needs in (False, True, True, True))
for program in (returns, saves):
    torch.compile(program)(x, *others)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_forwards_alike_of_which_one_saves_what_the_other_returns_are_told_apart(
    run_program: Run,
) -> None:
    """They are one graph. Inductor would give the second one the code of the first, with what was noted of its outputs."""
    assert [json.loads(run_program(ALIKE).output) for _ in range(2)] == [[[], [3, 4]]] * 2


def test_keys_depend_on_the_returned_outputs_only_while_a_forward_is_compiled() -> None:
    """Before, as where AOTAutograd makes a key of its own, the context may have the metadata of another graph."""
    context, found = torch._guards.TracingContext(None), []
    context.fw_metadata = SimpleNamespace(num_forward=3)
    with torch._guards.tracing(context):
        for name in (None, ["model__0_forward"], ["model__0_backward"], ["model__1_inference"]):
            context.aot_graph_name = name
            found.append(returned_outputs())
    assert found == [None, 3, None, 3]
