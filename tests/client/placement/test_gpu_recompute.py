"""What the GPU computes as the CPU does is computed there, of inputs that are sent; all else stays where it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.placement import fx_utils, gpu_recompute, inputs
from pygraphd.client.placement.inputs import place_inputs
from pygraphd.client.placement.upload import SENT
from tests.support.placement.graphs import Builder, assert_same, crossings, is_on_gpu, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

pytestmark = pytest.mark.torch

aten, prims = torch.ops.aten, torch.ops.prims
CPU = torch.device("cpu")


def changed(build: Builder, *outputs: Node) -> tuple[Graph, fx_utils.PassResult]:
    """Apply the rule to a graph, and see that it returns what it did, of other inputs, too."""
    graph = build.output(*outputs)
    calls = [build.inputs, [each + 1 for each in build.inputs], build.inputs]
    before = [run(graph, *each) for each in calls]
    moved = place_inputs(graph)
    graph.lint()
    for each, expected in zip(calls, before, strict=True):
        for one, right in zip(run(graph, *each), expected, strict=True):
            assert_same(one, right)
    return graph, moved


def assert_left(graph: Graph) -> None:
    """See that a graph stays what it is, though all of its values are small, and may be taken."""
    before = str(graph)
    gpu_recompute.recompute(graph, lambda _: True, lambda *_: True)
    assert str(graph) == before


def places(build: Builder, count: int = 6) -> Node:
    kinds = {"dtype": torch.int64, "device": CPU, "requires_grad": False}
    return build.call(prims.iota.default, count, start=0, step=1, **kinds)


def on_cpu(build: Builder, *values: int, dtype: torch.dtype = torch.int64) -> Node:
    return build.input(torch.tensor(values, dtype=dtype), on_gpu=False)


def first(build: Builder, x: Node) -> Node:
    return build.call(aten.slice.Tensor, x, 0, 0, 1)


def chosen_places(build: Builder, end: Node) -> Node:
    """Compute places below an end, and from there on the next ones."""
    each = places(build, 60_000)
    more = build.call(aten.add.Tensor, each, 1)
    return build.call(aten.where.self, build.call(aten.lt.Tensor, each, end), each, more)


def joined_bits(build: Builder) -> Node:
    more = build.call(aten.full.default, [], 32_768, dtype=torch.int64)
    return build.call(aten.bitwise_or.Tensor, places(build, 32_768), more)


def full(build: Builder, value: float, dtype: torch.dtype = torch.float32) -> Node:
    return build.call(aten.full.default, [], value, dtype=dtype)


def before_the_end(build: Builder, lengths: Node) -> Node:
    """Compute of as many lengths the mask of as many rows."""
    return build.call(aten.lt.Tensor, places(build), build.call(aten.unsqueeze.default, lengths, 1))


def computed_on_cpu(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op != "placeholder" and fx_utils.is_on_cpu(node)]


def sent_kinds(graph: Graph) -> Any:
    (sent,) = graph.find_nodes(op="call_function", target=SENT)
    return sent.args[2]


def test_a_mask_is_computed_of_lengths_that_are_sent() -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)
    masked = build.call(aten.mul.Tensor, x, build.to_gpu(before_the_end(build, lengths)))

    graph, moved = changed(build, masked)

    assert moved == fx_utils.PassResult(1, ())
    assert sent_kinds(graph) == "int64[3]"
    assert computed_on_cpu(graph) == []
    assert crossings(graph) == []
    (maker,) = graph.find_nodes(op="call_function", target=prims.iota.default)
    assert maker.kwargs["device"] == fx_utils.fake(masked).device


def test_masks_of_two_inputs_and_of_any_size_are_sent_as_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_BYTES", 32)
    build = Builder()
    x = build.input(torch.randn(3, 6))
    for length in ((4, 1, 2), (6, 6, 0)):
        mask = before_the_end(build, on_cpu(build, *length))
        chosen = build.call(aten.where.self, mask, full(build, -1e9), full(build, 0.0))
        x = build.call(aten.add.Tensor, x, build.to_gpu(chosen))

    graph, moved = changed(build, x)

    assert moved.left == ()
    assert sent_kinds(graph) == "int64[3] int64[3]"
    assert computed_on_cpu(graph) == []


def test_what_the_cpu_needs_as_well_both_compute() -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)
    mask = before_the_end(build, lengths)
    masked = build.call(aten.mul.Tensor, x, build.to_gpu(mask))

    graph, moved = changed(build, masked, mask)

    assert moved == fx_utils.PassResult(1, ())
    returned: Any = list(graph.nodes)[-1].args[0]
    assert [is_on_gpu(node) for node in returned] == [True, False]
    assert crossings(graph) == []


def otherwise_computed(build: Builder, lengths: Node) -> list[Node]:
    return [build.call(aten.cumsum.default, lengths, 0)]


def by_way_of_the_mask(build: Builder, lengths: Node) -> list[Node]:
    return [build.call(aten.cumsum.default, before_the_end(build, lengths), 0)]


def written_back(build: Builder, lengths: Node) -> list[Node]:
    build.call(aten.copy_.default, lengths, build.call(aten.add.Tensor, lengths, 1))
    return []


@pytest.mark.parametrize("more", [otherwise_computed, by_way_of_the_mask, written_back])
def test_what_is_made_of_an_input_that_would_not_be_sent_is_left(
    more: Callable[[Builder, Node], list[Node]],
) -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)
    mask = build.to_gpu(before_the_end(build, lengths))
    masked = build.call(aten.mul.Tensor, x, mask)
    graph = build.output(masked, *more(build, lengths))

    assert_left(graph)


def test_what_is_left_for_one_keeps_its_inputs_for_others() -> None:
    build = Builder()
    x = build.input(torch.randn(3, 6))
    lengths, others, more = on_cpu(build, 4, 1, 2), on_cpu(build, 1, 2, 3), on_cpu(build, 3, 2, 1)
    one, other, third = (before_the_end(build, each) for each in (lengths, others, more))
    both = build.call(aten.logical_and.default, one, other)
    for mask in (other, both, third):
        x = build.call(aten.mul.Tensor, x, build.to_gpu(mask))
    graph = build.output(x, build.call(aten.cumsum.default, lengths, 0))

    gpu_recompute.recompute(graph, lambda _: True, lambda *_: True)

    copied = [node.args[0] for node in graph.find_nodes(op="call_function", target=fx_utils.COPY)]
    assert copied == [more, other, both]


def test_inputs_of_more_than_a_few_bytes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_recompute, "MAX_INPUT_BYTES", 40)
    build = Builder()
    x = build.input(torch.randn(3, 6))
    for values in ((4, 1, 2), (6, 6, 0)):
        x = build.call(aten.mul.Tensor, x, build.to_gpu(before_the_end(build, on_cpu(build, *values))))

    graph, _ = changed(build, x)

    assert [each.target for each in computed_on_cpu(graph)].count(aten.lt.Tensor) == 1


def test_an_index_is_computed_there() -> None:
    build = Builder()
    x, start = build.input(torch.randn(9)), on_cpu(build, 1)

    graph, moved = changed(build, build.index(x, build.call(aten.add.Tensor, places(build), start)))

    assert moved == fx_utils.PassResult(1, ())
    assert sent_kinds(graph) == "int64[1]"
    assert computed_on_cpu(graph) == []


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda build, x: build.call(
                aten.lt.Tensor, build.call(aten.mul.Tensor, *[places(build, 60_000)] * 2), first(build, x)
            ),
            id="a product of places beyond 32 bits",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.lt.Tensor, build.call(aten.mul.Tensor, places(build), 1 << 30), first(build, x)
            ),
            id="a place times a number beyond 32 bits",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.add.Tensor, first(build, x), places(build, 60_000), alpha=100_000
            ),
            id="a multiple of places that is added",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.add.Tensor, first(build, x), build.call(aten.add.Scalar, places(build), 60_000, 100_000)
            ),
            id="a multiple of a number that is added to places",
        ),
        pytest.param(
            lambda build, x: build.call(aten.mul.Tensor, *[chosen_places(build, first(build, x))] * 2),
            id="a product of places that were chosen",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.lt.Tensor, build.call(aten.mul.Tensor, *[joined_bits(build)] * 2), first(build, x)
            ),
            id="a product of bits of places",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.add.Tensor,
                build.call(
                    prims.convert_element_type.default,
                    build.call(prims.convert_element_type.default, places(build, 300), torch.int8),
                    torch.int64,
                ),
                first(build, x),
            ),
            id="places that were cut off",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.where.self, build.call(aten.gt.Scalar, x, 1), full(build, -1e-50), full(build, 1.0)
            ),
            id="a number that becomes minus zero",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.where.self,
                build.call(aten.gt.Scalar, x, 1),
                full(build, 0.1, torch.bfloat16),
                full(build, 0.0, torch.bfloat16),
            ),
            id="a number that a short float rounds",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.where.self, build.call(aten.gt.Scalar, x, 1), full(build, -0.0), full(build, 1.0)
            ),
            id="minus zero",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.where.self, build.call(aten.gt.Scalar, x, 1), x, full(build, 0.5, torch.bfloat16)
            ),
            id="a choice that rounds",
        ),
        pytest.param(lambda build, x: build.call(aten.div.Tensor, x, 3), id="a quotient"),
        pytest.param(lambda build, x: build.call(aten.remainder.Scalar, x, 3), id="a remainder"),
        pytest.param(lambda build, x: build.call(aten.mul.Tensor, x, 0.5), id="a float"),
        pytest.param(lambda build, x: build.call(aten.lt.Scalar, x, 1.5), id="held against a float"),
        pytest.param(
            lambda build, x: build.call(aten.lt.Scalar, x, 1 << 40), id="held against a large number"
        ),
        pytest.param(
            lambda build, x: build.call(prims.convert_element_type.default, x, torch.float16), id="rounded"
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.add.Tensor, build.call(prims.convert_element_type.default, x, torch.uint8), 250
            ),
            id="narrow",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.maximum.default, *[build.call(prims.convert_element_type.default, x, torch.int16)] * 2
            ),
            id="the greater of narrow ones",
        ),
        pytest.param(
            lambda build, x: build.call(
                aten.lt.Scalar, build.call(prims.convert_element_type.default, x, torch.int16), 1 << 20
            ),
            id="narrow, held against a number",
        ),
    ],
)
def test_what_might_have_other_bits_is_computed_on_the_cpu(
    make: Callable[[Builder, Node], Node],
) -> None:
    build = Builder()
    x, values = build.input(torch.randn(1)), on_cpu(build, 4, 1, 2)
    made = make(build, values)

    graph, _ = changed(build, build.call(aten.mul.Tensor, x, build.to_gpu(made)))

    assert made.target in {each.target for each in computed_on_cpu(graph)}


def test_places_that_an_input_chooses_are_places() -> None:
    build = Builder()
    x, which = build.input(torch.randn(1)), on_cpu(build, 1, dtype=torch.bool)
    each = places(build, 60_000)
    chosen = build.call(aten.where.self, which, each, build.call(aten.add.Tensor, each, 1))
    product = build.call(aten.mul.Tensor, chosen, chosen)

    assert_left(build.output(build.call(aten.mul.Tensor, x, build.to_gpu(product))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_truth_values_become_numbers_of_any_type(dtype: torch.dtype) -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)
    made = build.call(prims.convert_element_type.default, before_the_end(build, lengths), dtype)

    graph, _ = changed(build, build.call(aten.mul.Tensor, x, build.to_gpu(made)))

    assert computed_on_cpu(graph) == []


def test_numbers_alone_are_left_to_pytorch() -> None:
    build = Builder()
    x, count = build.input(torch.randn(3)), build.input(torch.tensor(2), on_gpu=False)
    more = build.call(aten.add.Tensor, count, 1)

    assert_left(build.output(build.call(aten.mul.Tensor, x, more), build.to_gpu(more)))


def test_a_value_that_lies_otherwise_is_left() -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(6, 3)), on_cpu(build, 4, 1, 2)
    mask = build.call(aten.permute.default, before_the_end(build, lengths), [1, 0])

    assert_left(build.output(build.call(aten.mul.Tensor, x, build.to_gpu(mask))))


def test_what_is_taken_after_a_write_is_left() -> None:
    build = Builder()
    x, lengths, count = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2), on_cpu(build, 0)
    mask = before_the_end(build, lengths)
    build.call(aten.copy_.default, count, build.call(aten.add.Tensor, count, 1))

    assert_left(build.output(build.call(aten.mul.Tensor, x, build.to_gpu(mask))))


def test_a_backward_is_left() -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)
    x.name = "tangents_1"
    graph = build.output(build.call(aten.mul.Tensor, x, build.to_gpu(before_the_end(build, lengths))))

    assert_left(graph)


def test_a_value_that_is_too_large_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_recompute, "MAX_BYTES", 17)
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)

    graph, _ = changed(build, build.call(aten.mul.Tensor, x, build.to_gpu(before_the_end(build, lengths))))

    assert computed_on_cpu(graph) != []


def test_the_line_that_is_told_is_the_users() -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)

    _, moved = changed(build, build.call(aten.mul.Tensor, x, build.to_gpu(before_the_end(build, lengths))))

    assert list(moved.lines.values()) == [(" (model.py:12)",)]


def test_what_ends_early_leaves_a_graph_that_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    x, lengths = build.input(torch.randn(3, 6)), on_cpu(build, 4, 1, 2)
    mask = build.to_gpu(before_the_end(build, lengths))
    graph = build.output(build.call(aten.mul.Tensor, x, mask), mask)
    before = run(graph, *build.inputs)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(fx_utils, "replace_use", fail)
    with pytest.raises(RuntimeError, match="broken"):
        place_inputs(graph)

    graph.lint()
    for one, right in zip(run(graph, *build.inputs), before, strict=True):
        assert_same(one, right)


INTEGERS = frozenset({torch.int64, torch.int32})
UNARY = [aten.neg.default, aten.clone.default, aten.logical_not.default, aten.bitwise_not.default]
BINARY = [
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.lt.Tensor),
    *(aten.eq.Tensor, aten.logical_and.default, aten.bitwise_or.Tensor),
]
KINDS = [torch.int64, torch.int32, torch.bool, torch.float32, torch.uint8]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Builder, list[Node]]:
    """Build a small program whose CPU part computes with integers and truth values, exactly or not, and returns some."""
    build = Builder()
    gpu = [build.input(torch.randn(6))]
    given = [on_cpu(build, 3), on_cpu(build, *range(6)), on_cpu(build, 1, 0, 2, 5, 4, 7, dtype=torch.int32)]
    values = [*given, places(build)]
    for _ in range(draw(st.integers(1, 12))):
        value, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if draw(st.booleans()):
            values.append(draw(computed(build, value, other)))
        else:
            gpu.append(
                build.call(aten.mul.Tensor, draw(st.sampled_from(gpu)), draw(taken(build, gpu[0], value)))
            )
    outputs = draw(st.lists(st.sampled_from([*gpu, *values[3:]]), min_size=1, max_size=3, unique=True))
    return build, outputs


@st.composite
def computed(draw: st.DrawFn, build: Builder, value: Node, other: Node) -> Node:
    """Add something that the CPU computes of one or two values."""
    integers = {build.value(value).dtype, build.value(other).dtype} <= INTEGERS
    kind = draw(st.sampled_from(["one", "two", "convert", "choose"] if integers else ["convert", "choose"]))
    if kind == "one":
        return build.call(draw(st.sampled_from(UNARY)), value)
    if kind == "two":
        return build.call(draw(st.sampled_from(BINARY)), value, other)
    if kind == "choose":
        return build.call(aten.where.self, build.call(aten.gt.Scalar, value, 1), value, other)
    return build.call(prims.convert_element_type.default, value, draw(st.sampled_from(KINDS)))


@st.composite
def taken(draw: st.DrawFn, build: Builder, x: Node, value: Node) -> Node:
    """Add what takes a value to the GPU: a copy, or an index."""
    if build.value(value).dtype in INTEGERS and draw(st.booleans()):
        return build.index(x, build.call(aten.remainder.Scalar, value, 6))
    return build.to_gpu(value)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
@given(programs())
def test_any_program_computes_what_it_did(program: tuple[Builder, list[Node]]) -> None:
    build, outputs = program
    before = [(is_on_gpu(node), build.value(node).dtype, build.value(node).stride()) for node in outputs]

    graph, moved = changed(build, *outputs)

    returned: Any = list(graph.nodes)[-1].args[0]
    after = [(is_on_gpu(node), node.meta["val"].dtype, node.meta["val"].stride()) for node in returned]
    assert after == before
    assert all(inputs.CHANGED not in each for each in moved.left)
