"""Small CPU inputs are taken from the GPU, with the value that they have at that call, and nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.placement import fx_utils, inputs
from pygraphd.client.placement.inputs import place_inputs
from pygraphd.client.placement.upload import SENT, STAGED
from tests.support.placement.graphs import Builder, assert_same, crossings, is_on_gpu, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, Node

pytestmark = pytest.mark.torch

FEW = inputs.FEW_SCALARS
aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def changed(build: Builder, *outputs: Node) -> tuple[Graph, fx_utils.PassResult]:
    """Apply the rule to a graph, and see that it computes what it did with whatever its inputs hold."""
    graph = build.output(*outputs)
    calls = [build.inputs, [other(each) for each in build.inputs], build.inputs]
    before = [run(graph, *each) for each in calls]
    moved = place_inputs(graph)
    graph.lint()
    for each, expected in zip(calls, before, strict=True):
        for _ in range(2):
            found = run(graph, *each)
            for one, right in zip(found, expected, strict=True):
                assert_same(one, right)
                assert one.stride() == right.stride()
            for one in found:
                one.zero_()  # what a graph returns is the user's to change
    return graph, moved


def other(value: torch.Tensor) -> torch.Tensor:
    return value.flip(0) if value.dim() else value + 1


def sends(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=SENT))


def scalar(build: Builder, value: float = 2.5) -> Node:
    return build.input(torch.tensor(value), on_gpu=False)


def index(build: Builder) -> Node:
    return build.input(torch.tensor([1, 0, 3, 2]), on_gpu=False)


def test_a_temperature_is_taken_from_the_gpu() -> None:
    build = Builder()
    x, temperature = build.input(torch.randn(4)), scalar(build)

    graph, moved = changed(build, build.call(aten.div.Tensor, x, temperature))

    assert moved == fx_utils.PassResult(1, ())
    assert crossings(graph) == []
    (sent,) = sends(graph)
    assert sent.args[1:3] == (torch.device("cuda", 0), "float32[]")


def test_what_sends_comes_first_and_sends_all() -> None:
    build = Builder()
    x, one, two = build.input(torch.randn(4)), scalar(build), scalar(build, 3.5)
    y = build.call(aten.mul.Tensor, build.call(aten.neg.default, x), one)
    picked = build.index(y, index(build))

    graph, moved = changed(build, build.call(aten.add.Tensor, picked, two), build.to_gpu(two))

    assert (moved.uses, crossings(graph)) == (4, [])
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert calls[0].target is SENT
    assert len(sends(graph)) == 1


def test_a_python_number_is_rounded_on_the_gpu() -> None:
    """A float is 64 bits wide, and rounded to what it meets."""
    build = Builder()
    x = build.input(torch.randn(4))
    rate = build.input(torch.tensor(0.1, dtype=torch.float64), on_gpu=False)
    narrow = build.call(convert, rate, torch.float32)
    taken = build.call(aten.mul.Tensor, x, narrow)

    graph, moved = changed(build, taken, build.to_gpu(narrow), build.call(aten.add.Tensor, x, rate))

    assert (moved.uses, moved.left, crossings(graph)) == (3, (), [])
    assert is_on_gpu(narrow)


def test_an_input_that_is_returned_stays_where_it_is() -> None:
    build = Builder()
    x, temperature = build.input(torch.randn(4)), scalar(build)

    graph, moved = changed(build, build.call(aten.mul.Tensor, x, temperature), temperature)

    assert moved.uses == 1
    assert list(graph.nodes)[-1].args[0][1] is temperature


def test_a_copy_that_is_returned_is_one() -> None:
    build = Builder()
    graph, moved = changed(build, build.to_gpu(scalar(build)), build.to_gpu(index(build)))

    assert (moved.uses, len(sends(graph))) == (2, 1)
    assert len(graph.find_nodes(op="call_function", target=fx_utils.FRESH)) == 2


def test_an_unused_input_is_no_matter() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    scalar(build)

    graph, moved = changed(build, build.call(aten.neg.default, x))

    assert (moved, sends(graph)) == (fx_utils.PassResult(0, ()), [])


def test_what_the_cpu_keeps_to_itself_is_no_matter() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    step = build.call(aten.add.Tensor, scalar(build), 1)

    graph, moved = changed(build, build.call(aten.neg.default, x), step)

    assert (moved, sends(graph)) == (fx_utils.PassResult(0, ()), [])


Use = tuple["Node", "list[Node]"]


def used_here(build: Builder, x: Node) -> Use:
    step = scalar(build)
    return build.call(aten.mul.Tensor, x, step), [build.call(aten.erf.default, step)]


def changed_in_place(build: Builder, x: Node) -> Use:
    step = scalar(build)
    taken = build.call(aten.mul.Tensor, x, step)
    return taken, [build.call(aten.copy_.default, step, scalar(build))]


def a_mask(build: Builder, x: Node) -> Use:
    mask = build.input(torch.tensor([True, False, True, False]), on_gpu=False)
    return build.index(x, mask), []


def too_large(build: Builder, x: Node) -> Use:
    return build.to_gpu(build.input(torch.zeros(inputs.MAX_INPUT_BYTES // 4 + 1), on_gpu=False)), []


def not_contiguous(build: Builder, x: Node) -> Use:
    return build.to_gpu(build.input(torch.ones(3, 2).t(), on_gpu=False)), []


def complex_conjugate(build: Builder, x: Node) -> Use:
    return build.to_gpu(build.input(torch.ones(2, dtype=torch.complex64).conj(), on_gpu=False)), []


def taken_otherwise(build: Builder, x: Node) -> Use:
    return build.call(aten.index_put.default, x, [build.to_gpu(index(build))], scalar(build)), []


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (used_here, inputs.USED_HERE),
        (changed_in_place, inputs.CHANGED),
        (a_mask, fx_utils.A_MASK),
        (too_large, inputs.TOO_LARGE),
        (not_contiguous, inputs.NOT_PLAIN),
        (complex_conjugate, inputs.NOT_PLAIN),
    ],
)
def test_what_is_left_is_said_with_its_line(use: Callable[[Builder, Node], Use], reason: str) -> None:
    build = Builder()
    taken, more = use(build, build.input(torch.randn(4)))
    graph = build.output(taken, *more)
    before = [(node.name, node.args) for node in graph.nodes]

    moved = place_inputs(graph)

    assert moved == fx_utils.PassResult(
        0, (f"{taken.target} takes a CPU value to the GPU: {reason} (model.py:12)",)
    )
    assert [(node.name, node.args) for node in graph.nodes] == before


def test_a_value_that_is_written_by_indices_is_left() -> None:
    build = Builder()
    taken, _ = taken_otherwise(build, build.input(torch.randn(4)))

    _, moved = changed(build, taken)

    assert moved.uses == 1  # the index
    assert moved.left[0].endswith(f"{inputs.OTHER_USE} (model.py:12)")


def test_sizes_that_are_known_at_run_time_are_left() -> None:
    build = Builder()
    x, positions = build.input(torch.randn(4)), index(build)
    taken = build.index(x, positions)
    environment = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=environment)
    positions.meta["val"] = mode.from_tensor(
        torch.arange(4),
        symbolic_context=torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
            [torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC]
        ),
        source=torch._dynamo.source.ConstantSource("positions"),
    )

    moved = place_inputs(build.output(taken))

    said = f"aten.index.Tensor takes a CPU value to the GPU: {fx_utils.RUN_TIME_SIZE} (model.py:12)"
    assert moved == fx_utils.PassResult(0, (said,))


def test_what_is_sent_for_a_graph_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_BYTES_OF_GRAPH", 40)
    build = Builder()
    x = build.input(torch.randn(4))

    _, moved = changed(build, build.index(build.index(x, index(build)), index(build)))

    assert (moved.uses, moved.left[0].endswith(f"{inputs.TOO_MANY} (model.py:12)")) == (1, True)


def test_two_gpus_are_left_alone() -> None:
    build = Builder()
    step = scalar(build)
    one, other = build.to_gpu(step), build.to_gpu(step)
    other.meta["val"] = one.meta["val"].fake_mode.from_tensor(torch.ones(()))
    from pygraphd.client.backend import torch_private

    other.meta["val"] = torch_private.fake_on(torch.device("cuda", 1), other.meta["val"])

    moved = place_inputs(build.output(one, other))

    assert (moved.uses, len(moved.left)) == (0, 2)
    assert all(each.endswith(f"{inputs.SEVERAL_GPUS} (model.py:12)") for each in moved.left)


def test_graphs_are_named_alike_in_every_process() -> None:
    names = []
    for _ in range(2):
        build = Builder()
        graph, _ = changed(build, build.call(aten.mul.Tensor, build.input(torch.randn(4)), scalar(build)))
        names.append(sends(graph)[0].args[3])

    assert names[0] == names[1] != ""


def test_what_ends_early_leaves_a_graph_that_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    result = build.index(build.call(aten.mul.Tensor, x, scalar(build)), index(build))
    graph = build.output(result)
    (before,) = run(graph, *build.inputs)

    replace = fx_utils.replace_use

    def fail(graph: Graph, user: Node, value: Node, source: Node) -> None:
        if user.target in fx_utils.INDEXING:
            raise RuntimeError("broken")
        replace(graph, user, value, source)

    monkeypatch.setattr(fx_utils, "replace_use", fail)
    with pytest.raises(RuntimeError, match="broken"):
        place_inputs(graph)

    graph.lint()
    assert_same(run(graph, *build.inputs)[0], before)


POINTWISE = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Builder, list[Node]]:
    """Build a small program over vectors of four that takes inputs on the CPU in all ways, or computes with them there."""
    build = Builder()
    gpu = [build.input(torch.randn(4))]
    vectors = [index(build) for _ in range(draw(st.integers(0, 2)))]
    numbers = [scalar(build, number + 0.5) for number in range(draw(st.integers(1, 3)))]
    doubles = [build.input(torch.tensor(0.1, dtype=torch.float64), on_gpu=False)]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(
            st.sampled_from(
                ["scalar", "copy", "index", "round", "here", "meet", "elsewhere", "there", "write"]
            )
        )
        tensor = draw(st.sampled_from(gpu))
        if kind == "scalar":
            number = draw(st.sampled_from([*numbers, *doubles]))
            gpu.append(build.call(draw(st.sampled_from(POINTWISE)), tensor, number))
        elif kind == "copy":
            copy = build.to_gpu(draw(st.sampled_from(numbers)))
            gpu.append(build.call(aten.mul.Tensor, tensor, copy))
        elif kind == "index" and vectors:
            gpu.append(build.index(tensor, draw(st.sampled_from(vectors))))
        elif kind == "write" and vectors:
            value = draw(st.sampled_from([*gpu, *numbers]))
            gpu.append(build.call(aten.index_put.default, tensor, [draw(st.sampled_from(vectors))], value))
        elif kind == "round":
            numbers.append(build.call(convert, draw(st.sampled_from(doubles)), torch.float32))
        elif kind == "here":
            numbers.append(build.call(aten.add.Tensor, draw(st.sampled_from(numbers)), 1))
        elif kind == "there":
            gpu.append(build.call(draw(st.sampled_from(POINTWISE)), tensor, draw(st.sampled_from(gpu))))
    outputs = draw(st.lists(st.sampled_from([*gpu, *numbers]), min_size=1, max_size=3, unique=True))
    return build, outputs


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(programs())
def test_any_program_computes_what_it_did(program: tuple[Builder, list[Node]]) -> None:
    build, outputs = program
    before = {node: (is_on_gpu(node), build.value(node).dtype) for node in outputs}

    graph, moved = changed(build, *outputs)

    returned: Any = list(graph.nodes)[-1].args[0]
    assert [(is_on_gpu(node), node.meta["val"].dtype) for node in returned] == list(before.values())
    for node in crossings(graph):
        taken = [each for each in node.all_input_nodes if not is_on_gpu(each)]
        assert all(each.op != "placeholder" for each in taken) or moved.left
    if moved.uses:
        assert len(sends(graph)) == 1


# --- a few numbers --------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have there be a bound of few numbers, in a mode in which PyTorch moves them."""
    from torch._inductor import config

    monkeypatch.setattr(inputs, "FEW_SCALARS", FEW)
    with config.patch({"triton.cudagraphs": True}):
        yield


def multiplied(build: Builder, count: int, *, halves: bool = True) -> Node:
    """Return a value that takes some numbers, of every other one its half if it is to take `halves`, which the CPU computes."""
    taken = build.input(torch.randn(4))
    for number in range(count):
        value = scalar(build, 1.5 + number)
        half = build.call(aten.mul.Tensor, value, 0.5) if halves and number % 2 else value
        taken = build.call(aten.mul.Tensor, taken, half)
    return taken


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("count", [1, 2, FEW - 1, FEW, FEW + 1])
def test_a_few_numbers_are_left_to_pytorch(count: int) -> None:
    build = Builder()

    graph, moved = changed(build, multiplied(build, count))

    if count < FEW:
        assert (moved.uses, len(moved.left), sends(graph)) == (0, count, [])
        assert all(each.endswith(f"{inputs.ONLY_A_FEW} (model.py:12)") for each in moved.left)
    else:
        assert (moved, len(sends(graph))) == (fx_utils.PassResult(count, ()), 1)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("count", [1, 2, FEW - 1, FEW])
def test_a_few_numbers_are_copied_at_once_where_pytorch_moves_none(
    monkeypatch: pytest.MonkeyPatch, count: int, halves: bool
) -> None:
    """Inductor may reuse the memory of a number that the CPU computes, while the GPU still reads it: that is sent."""
    monkeypatch.setattr(inputs, "FEW_SCALARS", FEW)
    build = Builder()

    graph, moved = changed(build, multiplied(build, count, halves=halves))

    copies = list(graph.find_nodes(op="call_function", target=torch.ops.prims.device_put.default))
    assert moved == fx_utils.PassResult(count, ())
    is_copied = count < FEW and not (halves and count > 1)
    assert (len(sends(graph)), len(copies)) == ((0, 1) if is_copied else (1, 0))
    assert crossings(graph) == copies
    assert all(each.args[0].target is STAGED for each in copies)


@pytest.mark.parametrize("count", [1, 3])
def test_the_cpu_computes_nothing_for_a_few_numbers_that_are_copied_as_they_are(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(inputs, "FEW_SCALARS", FEW)
    build = Builder()
    numbers = [build.input(torch.tensor(0.1 + each).double(), on_gpu=False) for each in range(count)]
    taken = build.input(torch.randn(4))
    for number in numbers:
        taken = build.call(aten.div.Tensor, taken, build.call(convert, number, torch.float32))

    graph, moved = changed(build, taken)

    assert moved == fx_utils.PassResult(count, ())
    on_cpu = [node for node in graph.nodes if node.op == "call_function" and not is_on_gpu(node)]
    assert [(node.target, node.args[0]) for node in on_cpu] == [(STAGED, numbers)]
    assert [node.args[0] for node in crossings(graph)] == on_cpu


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("computed", [None, aten.exp.default, convert])
def test_a_number_that_is_returned_too_is_not_left_to_pytorch(computed: Any) -> None:
    """A forward saves it for its backward; PyTorch 2.11 would move it to the GPU there, and compile the backward for the CPU."""
    build = Builder()
    number = scalar(build)
    if computed is not None:
        more = (torch.float64,) if computed is convert else ()
        number = build.call(computed, number, *more)
    result = build.call(aten.mul.Tensor, build.input(torch.randn(4)), number)

    graph, moved = changed(build, result, number)

    assert (moved, len(sends(graph))) == (fx_utils.PassResult(1, ()), 1)
    assert not is_on_gpu(graph.output_node().args[0][1])


@pytest.mark.usefixtures("few")
def test_numbers_of_several_types_are_not_left_to_pytorch() -> None:
    """Its pass concatenates them, and an int64 beside a float64 would come back as a float64 (2**62 + 1 as 2**62)."""
    build = Builder()
    whole, real = (
        build.input(torch.tensor(2**62 + 1), on_gpu=False),
        build.input(torch.tensor(1e308), on_gpu=False),
    )
    x = build.input(torch.ones(4, dtype=torch.int64))

    graph, moved = changed(build, build.call(aten.mul.Tensor, x, whole), build.call(aten.mul.Tensor, x, real))

    assert (moved, len(sends(graph))) == (fx_utils.PassResult(2, ()), 1)


def copied(build: Builder) -> Node:
    return build.to_gpu(scalar(build))


def picked(build: Builder) -> Node:
    return build.index(build.input(torch.randn(4)), index(build))


def by_a_table(build: Builder) -> Node:
    table = build.call(aten.mul.Tensor, build.input(torch.ones(4), on_gpu=False), 2)
    return build.call(aten.mul.Tensor, build.input(torch.randn(4)), build.to_gpu(table))


def by_a_counter(build: Builder) -> Node:
    step = scalar(build)
    count = build.call(aten.add.Tensor, step, 1)
    result = build.call(aten.div.Tensor, build.input(torch.randn(4)), count)
    build.call(aten.copy_.default, step, count)
    return result


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("taking", [copied, picked, by_a_table, by_a_counter])
def test_what_the_host_would_wait_for_is_sent_and_a_number_beside_it_too(
    taking: Callable[[Builder], Node],
) -> None:
    build = Builder()
    taken = build.call(aten.mul.Tensor, taking(build), scalar(build))
    graph = build.output(taken)

    moved = place_inputs(graph)

    assert (moved.left, len(sends(graph)), crossings(graph)) == ((), 1, [])
