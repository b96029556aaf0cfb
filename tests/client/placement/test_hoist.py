"""What the CPU computes of small inputs stays on the CPU, comes first, and only its results are sent; nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.placement import fx_utils, hoist, inputs
from pygraphd.client.placement.inputs import place_inputs
from pygraphd.client.placement.upload import SENT
from tests.support.placement.graphs import Builder, assert_same, crossings, is_on_gpu, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

pytestmark = pytest.mark.torch

aten, prims = torch.ops.aten, torch.ops.prims


def changed(build: Builder, *outputs: Node) -> tuple[Graph, fx_utils.PassResult]:
    """Apply the rule to a graph, and see that it returns what it did, and writes what it did to its inputs."""
    graph = build.output(*outputs)
    calls = [build.inputs, [each + 1 for each in build.inputs], build.inputs]
    before = [ran(graph, each) for each in calls]
    moved = place_inputs(graph)
    graph.lint()
    for each, expected in zip(calls, before, strict=True):
        for one, right in zip(ran(graph, each), expected, strict=True):
            assert_same(one, right)
    return graph, moved


def ran(graph: Graph, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a graph returns, and then its inputs as they are after it, twice."""
    given, found = [each.clone() for each in given], []
    for _ in range(2):
        found += [
            *(each.clone() for each in run(graph, *given, copied=False)),
            *(each.clone() for each in given),
        ]
    return found


def number(build: Builder, value: float = 2.5) -> Node:
    return build.input(torch.tensor(value), on_gpu=False)


def assert_in_order(graph: Graph) -> Node:
    """See that the CPU computes first, and that then all is sent at once; return what sends it."""
    (sent,) = graph.find_nodes(op="call_function", target=SENT)
    order = list(graph.nodes)
    before = order[: order.index(sent)]
    assert not any(is_on_gpu(node) for node in before if node.op != "placeholder")
    assert crossings(graph) == []
    for node in order[order.index(sent) :]:
        copies_back = node.target is aten.copy_.default
        assert copies_back or node.op == "output" or not fx_utils.is_on_cpu(node)
    return sent


def counter(build: Builder, x: Node, beta: float) -> tuple[Node, Node, Node]:
    step = number(build)
    count = build.call(aten.add.Tensor, step, 1)
    rest = build.call(aten.sub.Tensor, build.call(aten.pow.Scalar, beta, count), 1)
    return build.call(aten.mul.Tensor, x, rest), step, count


def test_counters_stay_on_the_cpu_and_what_is_made_of_them_is_sent_as_one_value() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    made = [counter(build, x, beta) for beta in (0.9, 0.99)]
    for _, step, count in made:
        build.call(aten.copy_.default, step, count)

    graph, moved = changed(build, *(result for result, _, _ in made))

    assert moved == fx_utils.PassResult(2, ())
    sent = assert_in_order(graph)
    assert sent.args[2] == "float32[2]"


def test_a_counter_that_the_gpu_takes_as_it_was_before() -> None:
    build = Builder()
    x, step = build.input(torch.randn(4)), number(build)
    result = build.call(aten.mul.Tensor, x, step)
    build.call(aten.copy_.default, step, build.call(aten.add.Tensor, step, 1))

    graph, moved = changed(build, result)

    assert moved == fx_utils.PassResult(1, ())
    assert assert_in_order(graph).args[2] == "float32[]"


def test_a_value_of_each_type_is_sent_in_its_shape() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    table = build.input(torch.rand(2, 4), on_gpu=False)
    order = build.input(torch.tensor([1, 0, 3, 2]), on_gpu=False)
    logarithms = build.call(aten.mul.Tensor, x, build.to_gpu(build.call(aten.log.default, table)))
    roots = build.call(aten.mul.Tensor, x, build.to_gpu(build.call(aten.sqrt.default, table)))
    picked = build.index(x, build.call(aten.remainder.Scalar, build.call(aten.add.Tensor, order, 1), 4))

    graph, moved = changed(build, logarithms, roots, picked)

    assert moved == fx_utils.PassResult(3, ())
    assert assert_in_order(graph).args[2] == "float32[16] int64[4]"


def test_masks_of_lengths_are_sent_with_what_the_cpu_computes_with_them_further() -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(2, 4)), build.input(torch.tensor([3, 1]), on_gpu=False)
    places = build.call(aten.arange.start_step, 0, 4, 1, device=torch.device("cpu"))
    places.target, places.args = prims.iota.default, (4,)
    places.kwargs = {"start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cpu")}
    places.kwargs = {**places.kwargs, "requires_grad": False}
    before = build.call(aten.lt.Tensor, places, build.call(aten.unsqueeze.default, lengths, 1))
    late = build.call(aten.logical_and.default, before, build.call(aten.ge.Scalar, places, 2))
    first = build.call(aten.select.int, late, 0, 0)

    graph, moved = changed(
        build, *(build.call(aten.mul.Tensor, x, build.to_gpu(each)) for each in (before, late, first))
    )

    assert moved == fx_utils.PassResult(3, ())
    assert assert_in_order(graph).args[2] == "bool[20]"


@pytest.mark.parametrize(("bound", "uses"), [(1 << 15, 1), ((1 << 15) - 1, 0)])
def test_what_is_computed_may_be_larger_than_an_input_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch, bound: int, uses: int
) -> None:
    monkeypatch.setattr(inputs, "MAX_COMPUTED_BYTES", bound)
    build = Builder()
    x, rates = build.input(torch.randn(8, 1 << 10)), build.input(torch.rand(8, 1), on_gpu=False)
    table = build.call(aten.mul.Tensor, rates, build.constant(torch.rand(1 << 10)))
    assert build.value(table).nbytes == 1 << 15 > inputs.MAX_INPUT_BYTES

    graph, moved = changed(build, build.call(aten.mul.Tensor, x, build.to_gpu(table)))

    assert (moved, len(crossings(graph))) == (fx_utils.PassResult(uses, ()), 1 - uses)


def test_constants_are_made_again_so_that_inductor_may_move_the_others() -> None:
    build = Builder()
    x, rate = build.input(torch.randn(4)), number(build)
    places = build.call(
        prims.iota.default,
        4,
        start=0,
        step=1,
        dtype=torch.int64,
        device=torch.device("cpu"),
        requires_grad=False,
    )
    moved_by_inductor = build.call(aten.mul.Tensor, x, build.to_gpu(places))
    slopes = build.to_gpu(build.call(aten.mul.Tensor, rate, places))

    graph, moved = changed(build, build.call(aten.add.Tensor, moved_by_inductor, slopes))

    assert moved == fx_utils.PassResult(1, ())
    makers = graph.find_nodes(op="call_function", target=prims.iota.default)
    assert [[user.target for user in each.users] for each in makers] == [[hoist.HERE], [fx_utils.COPY]]


def test_what_inductor_might_move_is_taken_by_an_operator_that_it_does_not_move() -> None:
    """In 2.11 it looks no further than the first user."""
    build = Builder()
    x, rate = build.input(torch.randn(4)), number(build)
    one = build.call(aten.full.default, [], 1.0)
    rest = build.call(aten.sub.Tensor, one, rate)

    graph, _ = changed(build, build.call(aten.mul.Tensor, x, rest))

    for node in graph.nodes:
        if fx_utils.is_on_cpu(node) and not node.all_input_nodes:
            assert [user.target for user in node.users] == [hoist.HERE]


def test_what_is_returned_stays_on_the_cpu() -> None:
    build = Builder()
    x, rate = build.input(torch.randn(4)), number(build)
    doubled = build.call(aten.mul.Tensor, rate, 2)

    graph, moved = changed(build, build.call(aten.mul.Tensor, x, doubled), doubled, rate)

    assert moved == fx_utils.PassResult(1, ())
    returned: Any = list(graph.nodes)[-1].args[0]
    assert [is_on_gpu(node) for node in returned] == [True, False, False]
    assert_in_order(graph)


Taken = tuple["Node", "list[Node]"]


def by_another_operator(build: Builder, x: Node, rate: Node) -> Taken:
    more = build.call(aten.erf.default, rate)
    return build.call(aten.mul.Tensor, x, build.call(aten.neg.default, rate)), [more]


def as_a_mask(build: Builder, x: Node, rate: Node) -> Taken:
    which = build.call(aten.gt.Tensor, rate, build.constant(torch.zeros(4)))
    positive = build.index(x, which)
    return build.call(aten.mul.Tensor, positive, build.call(aten.neg.default, rate)), []


def after_it_was_written(build: Builder, x: Node, rate: Node) -> Taken:
    doubled = build.call(aten.mul.Tensor, rate, 2)
    build.call(aten.copy_.default, rate, doubled)
    return build.call(aten.mul.Tensor, x, rate), []


def in_a_backward(build: Builder, x: Node, rate: Node) -> Taken:
    rate.name = "tangents_1"
    return build.call(aten.mul.Tensor, x, build.call(aten.neg.default, rate)), []


@pytest.mark.parametrize(
    ("take", "reason"),
    [
        (by_another_operator, inputs.USED_HERE),
        (as_a_mask, fx_utils.A_MASK),
        (after_it_was_written, inputs.CHANGED),
        (in_a_backward, inputs.SAVED),
    ],
)
def test_what_is_left_is_said_with_its_line(
    take: Callable[[Builder, Node, Node], Taken], reason: str
) -> None:
    build = Builder()
    x, rate = build.input(torch.randn(4)), number(build)
    taken, more = take(build, x, rate)
    graph = build.output(taken, *more)
    before = [(node.name, node.args) for node in graph.nodes]

    moved = place_inputs(graph)

    assert moved == fx_utils.PassResult(
        0, (f"aten.mul.Tensor takes a CPU value to the GPU: {reason} (model.py:12)",)
    )
    assert [(node.name, node.args) for node in graph.nodes] == before


def test_what_ends_early_leaves_a_graph_that_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    x, rate = build.input(torch.randn(4)), number(build)
    doubled = build.call(aten.mul.Tensor, rate, 2)
    graph = build.output(build.call(aten.mul.Tensor, x, doubled), doubled)
    before = run(graph, *build.inputs)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(fx_utils, "remove_unused", fail)
    with pytest.raises(RuntimeError, match="broken"):
        place_inputs(graph)

    graph.lint()
    for one, right in zip(run(graph, *build.inputs), before, strict=True):
        assert_same(one, right)


UNARY = [aten.neg.default, aten.abs.default, aten.sign.default, aten.exp.default, aten.clone.default]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Builder, list[Node]]:
    """Build a small program whose CPU part computes with numbers and vectors of four, writes some back, and returns some."""
    build = Builder()
    gpu = [build.input(torch.randn(4))]
    given = [number(build, 0.5 + each) for each in range(draw(st.integers(1, 3)))]
    given += [build.input(torch.rand(4), on_gpu=False) for _ in range(draw(st.integers(0, 2)))]
    values = [
        *given,
        build.constant(torch.tensor([0.5, 1.0, 2.0, 4.0])),
        build.call(aten.full.default, [], 2.0),
    ]
    computed: list[Node] = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["one", "two", "choose", "scalar", "copy", "copy"]))
        value = draw(st.sampled_from(values))
        if kind == "one":
            values.append(build.call(draw(st.sampled_from(UNARY)), value))
        elif kind == "two":
            values.append(build.call(draw(st.sampled_from(BINARY)), value, draw(st.sampled_from(values))))
        elif kind == "choose":
            condition = build.call(aten.gt.Scalar, value, 1.0)
            values.append(build.call(aten.where.self, condition, value, draw(st.sampled_from(values))))
        elif kind == "scalar" and not build.value(value).dim():
            gpu.append(build.call(draw(st.sampled_from(BINARY)), draw(st.sampled_from(gpu)), value))
        elif kind == "copy":
            gpu.append(build.call(aten.mul.Tensor, draw(st.sampled_from(gpu)), build.to_gpu(value)))
        computed = values[len(given) + 2 :]
    outputs = draw(st.lists(st.sampled_from([*gpu, *computed]), min_size=1, max_size=3, unique=True))
    for each in given:
        alike = [one for one in computed if build.value(one).size() == build.value(each).size()]
        written = draw(st.sampled_from([None, *alike]))
        if written is not None:
            build.call(aten.copy_.default, each, written)
    return build, outputs


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(programs())
def test_any_program_computes_what_it_did_in_order(program: tuple[Builder, list[Node]]) -> None:
    build, outputs = program
    before = {node: (is_on_gpu(node), build.value(node).dtype) for node in outputs}

    graph, moved = changed(build, *outputs)

    returned: Any = list(graph.nodes)[-1].args[0]
    assert [(is_on_gpu(node), node.meta["val"].dtype) for node in returned] == list(before.values())
    assert all(inputs.CHANGED in each for each in moved.left)  # an input that becomes a constant, or another
    if moved.uses:
        (sent,) = graph.find_nodes(op="call_function", target=SENT)
        order = list(graph.nodes)
        assert not any(is_on_gpu(node) for node in order[: order.index(sent)] if node.op != "placeholder")
