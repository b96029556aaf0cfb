"""Values that are known when a graph is compiled are taken from the GPU, and nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.placement import constants, fx_utils
from pygraphd.client.placement.constants import place_constants
from tests.support.placement.graphs import (
    COPY,
    GPU,
    NOTED,
    Builder,
    assert_same,
    crossings,
    is_on_gpu,
    place,
    run,
)

if TYPE_CHECKING:
    from torch.fx import Graph, Node

pytestmark = pytest.mark.torch

aten = torch.ops.aten


def changed(build: Builder, *outputs: Node) -> tuple[Graph, fx_utils.PassResult]:
    """Apply the rule to a graph, and see that it computes what it did, time and again."""
    graph = build.output(*outputs)
    before = run(graph, *build.inputs)
    moved = place_constants(graph, place)
    graph.lint()
    for _ in range(2):
        for result, expected in zip(run(graph, *build.inputs), before, strict=True):
            assert_same(result, expected)
            assert result.stride() == expected.stride()
            result.zero_()  # what a graph returns is the user's to change
    return graph, moved


def constant_index(build: Builder, *values: int) -> Node:
    constant = build.constant(torch.tensor(values))
    return build.call(aten.lift_fresh_copy.default, constant)


def test_indices_of_a_forward_are_taken_from_the_gpu() -> None:
    """As a DLRM picks the pairs of features that it multiplies."""
    build = Builder()
    x = build.input(torch.randn(4, 3, 3))
    picked = build.index(x, None, constant_index(build, 1, 2, 2), constant_index(build, 0, 0, 1))
    assert len(picked.all_input_nodes) == 3

    graph, moved = changed(build, build.call(aten.mul.Tensor, picked, picked))

    assert moved == fx_utils.PassResult(2, ())
    assert crossings(graph) == []
    assert [node.target for node in graph.nodes if node.op == "get_attr"] == [
        "_pygraph_known_1",
        "_pygraph_known_0",
    ]
    assert not any(node.target is aten.lift_fresh_copy.default for node in graph.nodes)


def test_copies_of_what_is_known_are_made_once() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    table = build.call(aten.lift_fresh_copy.default, build.constant(torch.tensor([0.1, 0.2, 0.3, 0.4])))
    half = build.call(aten.exp.default, build.call(aten.mul.Tensor, table, 0.5))
    there = build.to_gpu(half)

    graph, moved = changed(build, build.call(aten.add.Tensor, x, there), there)

    assert moved.uses == 1
    assert crossings(graph) == []
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        aten.lift_fresh_copy.default,
        aten.add.Tensor,
    ]


@pytest.mark.parametrize(("cudagraphs", "uses", "cuts"), [(True, 0, 1), (False, 1, 0)])
def test_a_copy_of_a_value_of_sizes_alone_is_left_to_inductor_where_it_moves_it(
    cudagraphs: bool, uses: int, cuts: int
) -> None:
    build = Builder()
    x = build.input(torch.randn(6))
    positions = build.call(aten.arange.start_step, 0, 12, 2, device=torch.device("cpu"))
    sines = build.call(aten.sin.default, build.call(aten.mul.Tensor, positions, 0.5))

    with torch._inductor.config.patch({"triton.cudagraphs": cudagraphs}):
        graph, moved = changed(build, build.call(aten.mul.Tensor, x, build.to_gpu(sines)))

    assert moved == fx_utils.PassResult(uses, ())
    assert len(crossings(graph)) == cuts


def test_an_index_of_sizes_alone_is_left_to_inductor_in_every_mode() -> None:
    build = Builder()
    x = build.input(torch.randn(6))
    positions = build.call(aten.arange.start_step, 0, 6, 2, device=torch.device("cpu"))

    graph, moved = changed(build, build.index(x, positions))

    assert moved == fx_utils.PassResult(0, ())
    assert len(crossings(graph)) == 1


def test_what_constants_and_sizes_say_together_is_known() -> None:
    build = Builder()
    x = build.input(torch.randn(6))
    positions = build.call(aten.arange.start_step, 0, 6, 1, device=torch.device("cpu"))
    index = build.call(aten.sub.Tensor, constant_index(build, 5, 5, 5, 5, 5, 5), positions)

    graph, moved = changed(build, build.index(x, index))

    assert (moved.uses, crossings(graph)) == (1, [])


def test_anchors_of_a_detector_are_known_as_a_whole() -> None:
    """Places in a grid, stacked, plus shapes: with any of it left on the CPU, torch 2.11 does not compile this in modes with CUDA Graphs."""
    build = Builder()
    x = build.input(torch.randn(2, 3, 4))
    places = build.call(aten.arange.default, 3, device=torch.device("cpu"), pin_memory=False)
    stacked = build.call(aten.stack.default, [places, places], -1)
    shapes = build.call(aten.lift_fresh_copy.default, build.constant(torch.tensor([[1], [2]]).unsqueeze(-1)))
    anchors = build.to_gpu(build.call(aten.add.Tensor, stacked, shapes))
    shifted = build.call(aten.mul.Tensor, build.call(aten.sum.dim_IntList, x, [-1]), 1)

    graph, moved = changed(build, shifted, anchors)

    assert moved == fx_utils.PassResult(1, ())
    assert crossings(graph) == []
    assert not [node for node in graph.nodes if node.op == "call_function" and not is_on_gpu(node)]


def test_numbers_that_the_cpu_goes_on_with_stay_there() -> None:
    """Else one value would have two, which differ in their last bits: what is compiled computes otherwise."""
    build = Builder()
    x = build.input(torch.randn(2))
    table = build.call(aten.lift_fresh_copy.default, build.constant(torch.tensor([0.1, 0.2])))
    computed = build.call(aten.exp.default, table)
    further = build.call(aten.neg.default, computed)

    graph, moved = changed(
        build, build.call(aten.add.Tensor, x, build.to_gpu(computed)), further, build.to_gpu(table)
    )

    assert (moved.uses, len(moved.left), moved.left[0].endswith(f"{constants.USED_HERE} (model.py:12)")) == (
        1,
        1,
        True,
    )
    assert len(crossings(graph)) == 1


@pytest.mark.parametrize("returned", ["index", "root", "half of the root"])
def test_an_index_by_way_of_numbers_that_the_program_gets_stays(returned: str) -> None:
    """Compiled code may round them otherwise, and the index that the program gets would not be the one that the GPU used."""
    build = Builder()
    table = build.call(aten.lift_fresh_copy.default, build.constant(torch.tensor([4.0, 9.0])))
    root = build.call(aten.exp.default, build.call(aten.mul.Tensor, build.call(aten.log.default, table), 0.5))
    half = build.call(aten.mul.Tensor, root, 0.5)
    index = build.call(
        torch.ops.prims.convert_element_type.default, build.call(aten.round.default, root), torch.int64
    )
    picked = build.index(build.input(torch.randn(5)), index)

    _, moved = changed(build, picked, {"index": index, "root": root, "half of the root": half}[returned])

    assert moved.uses == 0
    assert [each for each in moved.left if constants.USED_HERE in each]


def test_tables_of_the_same_numbers_are_placed_together() -> None:
    """As sine and cosine of the frequencies of rotary embeddings."""
    build = Builder()
    table = build.call(aten.lift_fresh_copy.default, build.constant(torch.tensor([0.1, 0.2, 0.3, 0.4])))
    frequencies = build.call(aten.exp.default, table)
    x = build.input(torch.randn(4))
    for function in (aten.sin.default, aten.cos.default):
        x = build.call(aten.mul.Tensor, x, build.to_gpu(build.call(function, frequencies)))

    graph, moved = changed(build, x)

    assert moved == fx_utils.PassResult(2, ())
    assert crossings(graph) == []


def test_a_value_that_is_used_on_the_cpu_too_stays_there_as_well() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    on_cpu = build.input(torch.arange(4), on_gpu=False)
    index = constant_index(build, 3, 1, 0, 2)

    graph, moved = changed(build, build.index(x, index), build.call(aten.add.Tensor, on_cpu, index), index)

    assert (moved.uses, crossings(graph)) == (1, [])
    assert index in graph.nodes


def test_one_value_is_placed_once_for_all_its_uses() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    index = constant_index(build, 3, 1, 0, 2)
    first = build.index(x, index)
    second = build.index(first, index)
    written = build.call(aten.index_put.default, x, [index], second)

    graph, moved = changed(build, second, written)

    assert (moved.uses, crossings(graph)) == (3, [])
    assert sum(node.op == "get_attr" for node in graph.nodes) == 1


def test_what_ends_early_leaves_a_graph_that_computes_the_same() -> None:
    """Out of memory on the GPU, say."""
    build = Builder()
    x = build.input(torch.randn(4))
    picked = build.index(build.index(x, constant_index(build, 1, 0, 3, 2)), constant_index(build, 2, 2))
    graph = build.output(picked)
    (before,) = run(graph, *build.inputs)
    placed: list[torch.Tensor] = []

    def place_one(value: torch.Tensor, device: torch.device) -> torch.Tensor:
        if placed:
            raise torch.OutOfMemoryError
        placed.append(value)
        return place(value, device)

    with pytest.raises(torch.OutOfMemoryError):
        place_constants(graph, place_one)

    graph.lint()
    assert_same(run(graph, *build.inputs)[0], before)
    assert len(crossings(graph)) == 1


def test_names_of_the_module_are_not_taken() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    build.module._pygraph_known_0 = torch.ones(1)

    graph, _ = changed(build, build.index(x, constant_index(build, 1)))

    assert torch.equal(build.module._pygraph_known_0, torch.ones(1))
    assert crossings(graph) == []


def input_index(build: Builder) -> Node:
    return build.input(torch.tensor([1, 0]), on_gpu=False)


def computed_from_an_input(build: Builder) -> Node:
    return build.call(aten.add.Tensor, input_index(build), constant_index(build, 1, 1))


def random_index(build: Builder) -> Node:
    return build.call(aten.randint.low, 0, 2, [2], device=torch.device("cpu"))


def not_initialised(build: Builder) -> Node:
    empty = build.call(aten.empty.memory_format, [2], dtype=torch.int64, device=torch.device("cpu"))
    return build.call(aten.mul.Tensor, empty, 0)


def mask(build: Builder) -> Node:
    return build.constant(torch.tensor([True, False, True, True]))


def copied_from_an_input(build: Builder) -> Node:
    return build.call(aten.clone.default, input_index(build))


def mutated(build: Builder) -> Node:
    constant = build.constant(torch.tensor([1, 0]))
    build.call(aten.add_.Tensor, constant, 0)
    return constant


def with_side_effects(build: Builder) -> Node:
    return build.call(NOTED._opoverload, constant_index(build, 1, 1))


def sized_at_run_time(build: Builder) -> Node:
    index = constant_index(build, 1, 1)
    shapes = torch.fx.experimental.symbolic_shapes
    index.meta["val"] = torch._subclasses.FakeTensorMode(shape_env=shapes.ShapeEnv()).from_tensor(
        torch.arange(2),
        symbolic_context=shapes.StatelessSymbolicContext([shapes.DimDynamic.DYNAMIC]),
        source=torch._dynamo.source.ConstantSource("index"),
    )
    return index


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (with_side_effects, constants.NOT_PURE),
        (sized_at_run_time, fx_utils.RUN_TIME_SIZE),
        (computed_from_an_input, constants.INPUT),
        (random_index, constants.RANDOM),
        (not_initialised, constants.RANDOM),
        (mask, fx_utils.A_MASK),
        (copied_from_an_input, constants.INPUT),
        (mutated, constants.NOT_PLAIN),
    ],
)
def test_what_is_not_known_stays_where_it_is_and_that_is_said(index: Any, reason: str) -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    taken = build.index(x, index(build))
    graph = build.output(taken)
    before = [(node.name, node.args) for node in graph.nodes]

    moved = place_constants(graph, place)

    said = f"aten.index.Tensor takes a CPU value to the GPU: {reason} (model.py:12)"
    assert moved == fx_utils.PassResult(0, (said,))
    assert [(node.name, node.args) for node in graph.nodes] == before


def test_the_work_for_many_constants_is_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was given a name by asking for all those before it: four seconds of a compilation with 4,000."""
    asked, original = [0], torch.nn.Module.__getattr__

    def counting(module: torch.nn.Module, name: str) -> Any:
        asked[0] += 1
        return original(module, name)

    monkeypatch.setattr(torch.nn.Module, "__getattr__", counting)
    work = []
    for count in (10, 40):
        build = Builder()
        x = build.input(torch.randn(4))
        graph = build.output(*(build.index(x, constant_index(build, each % 4)) for each in range(count)))
        asked[0] = 0
        assert place_constants(graph, place).uses == count
        work.append(asked[0])

    assert 0 < work[1] <= 5 * work[0]


def test_large_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "MAX_CONSTANT_BYTES", 64)
    build = Builder()
    x = build.input(torch.randn(9))
    small, large = constant_index(build, *range(8)), constant_index(build, *range(9))

    graph, moved = changed(build, build.index(x, small), build.index(x, large))

    assert moved.uses == 1
    assert [reason.partition(": ")[2] for reason in moved.left] == [f"{constants.TOO_LARGE} (model.py:12)"]
    assert len(crossings(graph)) == 1


def test_what_is_known_of_a_graph_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "MAX_GRAPH_BYTES", 40)
    build = Builder()
    x = build.input(torch.randn(4))
    first, second = constant_index(build, 1, 2), constant_index(build, 1, 2, 3, 0)

    _, moved = changed(build, build.index(x, first), build.index(x, second))

    assert (moved.uses, moved.left[0].endswith(f"{constants.TOO_MANY} (model.py:12)")) == (1, True)


def test_a_copy_that_would_lie_otherwise_stays() -> None:
    build = Builder()
    x = build.input(torch.randn(2, 3))
    row = build.call(aten.expand.default, constant_index(build, 1, 2, 3), [2, 3])
    copy = build.to_gpu(row)

    _, moved = changed(build, build.call(aten.add.Tensor, x, copy))

    assert (moved.uses, len(moved.left)) == (0, 1)


def test_what_cannot_be_computed_stays() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    index = constant_index(build, 1, 2)
    taken = build.index(x, index)
    (lift,) = (node for node in build.graph.nodes if node.target is aten.lift_fresh_copy.default)
    lift.args = (*lift.args, "too many")
    graph = build.output(taken)

    moved = place_constants(graph, place)

    assert (moved.uses, moved.left[0].endswith(f"{constants.NOT_COMPUTED} (model.py:12)")) == (0, True)


def test_a_long_chain_is_no_trouble() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    index = constant_index(build, 1, 2)
    for _ in range(3000):
        index = build.call(aten.add.Tensor, index, 0)

    graph, moved = changed(build, build.index(x, index))

    assert (moved.uses, crossings(graph)) == (1, [])
    assert len(list(graph.nodes)) == 4


def ancestors(node: Node) -> set[Node]:
    found, waiting = {node}, [node]
    while waiting:
        more = [each for each in waiting.pop().all_input_nodes if each not in found]
        found.update(more)
        waiting += more
    return found


UNARY = [aten.neg.default, aten.abs.default, aten.clone.default]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Builder, list[Node]]:
    """Build a small program over vectors of four: CPU constants, sizes and inputs, copies to the GPU, and indexing there."""
    build = Builder()
    gpu = [build.input(torch.randn(4)) for _ in range(draw(st.integers(1, 2)))]
    cpu = [build.input(torch.tensor([1, 0, 3, 2]), on_gpu=False)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["constant", "sizes", "unary", "binary", "copy", "index", "on the gpu"]))
        if kind == "constant":
            cpu.append(constant_index(build, *draw(st.permutations(range(4)))))
        elif kind == "sizes":
            cpu.append(build.call(aten.arange.start_step, 0, 4, 1, device=torch.device("cpu")))
        elif kind == "on the gpu":
            pair = draw(st.sampled_from(gpu)), draw(st.sampled_from(gpu))
            gpu.append(build.call(draw(st.sampled_from(BINARY)), *pair))
        elif cpu and kind == "unary":
            cpu.append(build.call(draw(st.sampled_from(UNARY)), draw(st.sampled_from(cpu))))
        elif cpu and kind == "binary":
            pair = draw(st.sampled_from(cpu)), draw(st.sampled_from(cpu))
            cpu.append(build.call(draw(st.sampled_from(BINARY)), *pair))
        elif cpu and kind == "copy":
            gpu.append(build.to_gpu(draw(st.sampled_from(cpu))))
        elif cpu and kind == "index":
            index = build.call(aten.remainder.Scalar, draw(st.sampled_from(cpu)), 4)
            gpu.append(build.index(draw(st.sampled_from(gpu)), index))
    outputs = draw(st.lists(st.sampled_from([*gpu, *cpu]), min_size=1, max_size=3, unique=True))
    return build, outputs


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(programs())
def test_any_program_computes_what_it_did(program: tuple[Builder, list[Node]]) -> None:
    build, outputs = program
    before = {node: (is_on_gpu(node), build.value(node).dtype) for node in outputs}

    graph, moved = changed(build, *outputs)

    assert all(constants.INPUT in reason for reason in moved.left)
    for node in crossings(graph):
        for taken in node.all_input_nodes:
            sources = {each.op for each in ancestors(taken) if not is_on_gpu(each)}
            assert is_on_gpu(taken) or "placeholder" in sources or "get_attr" not in sources
    returned = list(graph.nodes)[-1].args[0]
    assert [(is_on_gpu(node), node.meta["val"].dtype) for node in returned] == list(before.values())
    assert not [node for node in graph.nodes if node.target is COPY and node.args[1] != GPU]
