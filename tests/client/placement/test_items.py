"""`.item()` that only feeds the GPU stays a tensor, where that computes the same bits; all others are left, and that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from pygraphd.client import _torch
from pygraphd.client.placement import items, nodes
from pygraphd.client.placement.items import keep_items
from tests.client.placement.graphs import GPU, Builder, assert_same, run
from tests.client.placement.with_rules import with_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.fx import Graph, Node

    from pygraphd.client.report import Report

pytestmark = pytest.mark.torch

aten = torch.ops.aten
ITEM = aten._local_scalar_dense.default


def changed(build: Builder, *outputs: Node, split: bool = True) -> tuple[Graph, nodes.Moved]:
    """Apply the rule to a graph, and see that it computes what it did, also of other inputs."""
    graph = build.output(*outputs)
    calls = [build.inputs, [each + 1 for each in build.inputs]]
    before = [run(graph, *each) for each in calls]
    moved = keep_items(graph, split=split)
    graph.lint()
    for each, expected in zip(calls, before, strict=True):
        for one, right in zip(run(graph, *each), expected, strict=True):
            assert_same(one, right)
    return graph, moved


def reads(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=ITEM))


@pytest.mark.parametrize("size", [(), (1,), (1, 1)])
def test_a_number_that_meets_tensors_stays_one(size: tuple[int, ...]) -> None:
    build = Builder()
    x, count = build.input(torch.randn(4)), build.input(torch.full(size, 3))
    number = build.call(ITEM, count)

    graph, moved = changed(build, build.call(aten.add.Tensor, build.call(aten.mul.Tensor, x, number), number))

    assert (moved, reads(graph)) == (nodes.Moved(2, ()), 0)


def test_a_number_from_the_cpu_matters_where_graphs_are_split() -> None:
    for split in (True, False):
        build = Builder()
        x, count = build.input(torch.randn(4)), build.input(torch.tensor(3), on_gpu=False)

        graph, moved = changed(build, build.call(aten.mul.Tensor, x, build.call(ITEM, count)), split=split)

        assert (moved, reads(graph)) == (nodes.Moved(int(split), ()), int(not split))


def test_what_the_cpu_reads_of_its_own_is_no_matter() -> None:
    build = Builder()
    x, count = build.input(torch.randn(4)), build.input(torch.tensor(3), on_gpu=False)

    _, moved = changed(build, build.call(aten.neg.default, x), build.call(ITEM, count))

    assert moved == nodes.Moved(0, ())


def returned(build: Builder, x: Node, number: Node) -> list[Node]:
    return [build.call(aten.mul.Tensor, x, number), number]


def a_size(build: Builder, x: Node, number: Node) -> list[Node]:
    return [build.call(aten.full.default, [number], 1.0, device=torch.device("cpu"))]


def narrow(build: Builder, x: Node, number: Node) -> list[Node]:
    return [build.call(aten.mul.Tensor, build.input(torch.ones(4, dtype=torch.bfloat16)), number)]


def without_dimensions(build: Builder, x: Node, number: Node) -> list[Node]:
    return [build.call(aten.mul.Tensor, build.input(torch.tensor(1, dtype=torch.int64)), number)]


def a_factor(build: Builder, x: Node, number: Node) -> list[Node]:
    return [build.call(aten.add.Tensor, x, x, alpha=number)]


def a_scalar(build: Builder, x: Node, number: Node) -> list[Node]:
    return [build.call(aten.mul.Scalar, x, number)]


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (returned, items.READ_HERE),
        (a_size, items.READ_HERE),
        (narrow, items.OTHER_USE),
        (without_dimensions, items.OTHER_USE),
        (a_factor, items.OTHER_USE),
        (a_scalar, items.OTHER_USE),
    ],
)
def test_what_is_left_is_said_with_its_line(
    use: Callable[[Builder, Node, Node], list[Node]], reason: str
) -> None:
    build = Builder()
    number = build.call(ITEM, build.input(torch.tensor(3)))

    graph, moved = changed(build, *use(build, build.input(torch.randn(4)), number))

    assert moved == nodes.Moved(
        0, (f"aten._local_scalar_dense.default reads a value on the CPU: {reason} (model.py:12)",)
    )
    assert reads(graph) == 1


def test_a_float_that_meets_integers_is_left() -> None:
    """A number makes 32-bit floats of them, and a tensor of 64 bits does not."""
    build = Builder()
    x, rate = build.input(torch.arange(4)), build.input(torch.tensor(0.5, dtype=torch.float64))

    _, moved = changed(build, build.call(aten.mul.Tensor, x, build.call(ITEM, rate)))

    assert moved.left[0].endswith(f"{items.OTHER_USE} (model.py:12)")


def test_numbers_of_other_kinds_are_left() -> None:
    build = Builder()
    x, flag = build.input(torch.randn(4)), build.input(torch.tensor(1, dtype=torch.uint8))

    _, moved = changed(build, build.call(aten.mul.Tensor, x, build.call(ITEM, flag)))

    assert moved.left[0].endswith(f"{items.NOT_PLAIN} (model.py:12)")


def test_a_number_of_another_gpu_is_left() -> None:
    build = Builder()
    x, count = build.input(torch.randn(4)), build.input(torch.tensor(3))
    count.meta["val"] = _torch.fake_on(torch.device("cuda", GPU.index + 1), count.meta["val"])

    _, moved = changed(build, build.call(aten.mul.Tensor, x, build.call(ITEM, count)))

    assert moved.left[0].endswith(f"{items.OTHER_USE} (model.py:12)")


BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]
TYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=80)
@given(st.data())
def test_any_program_computes_what_it_did(data: Any) -> None:
    """Bit for bit, and of the same type, whatever meets whatever."""
    build = Builder()
    number_type, on_gpu = data.draw(st.sampled_from(TYPES)), data.draw(st.booleans())
    value = torch.tensor(data.draw(st.integers(1, 2**24 + 1))).to(number_type) / 3
    number = build.call(ITEM, build.input(value.to(number_type), on_gpu=on_gpu))
    size = data.draw(st.sampled_from([(), (3,), (2, 2)]))
    result = build.input((torch.rand(size) * 1000).to(data.draw(st.sampled_from(TYPES))))
    for operator in data.draw(st.lists(st.sampled_from(BINARY), min_size=1, max_size=3)):
        result = build.call(operator, result, number)

    graph, moved = changed(build, result)

    assert (moved.uses > 0) == (reads(graph) == 0)
    assert bool(moved.uses) != bool(moved.left)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """Have the rules take this CPU for a GPU, and Dynamo trace `.item()`; return what the rules report to."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nodes, "is_elsewhere", lambda device: True)
    with with_rules() as report, dynamo_config.patch(capture_scalar_outputs=True):
        yield report


def counted(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return (x @ x * count.item()) @ x


def sized(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    n = count.item()
    return (x @ x * n) @ x.new_ones(4, n)


@pytest.mark.parametrize(("function", "kept"), [(counted, 1), (sized, 0)])
@pytest.mark.parametrize("mode", ["reduce-overhead", None])
def test_a_number_that_changes_is_seen_by_the_next_call(
    added: Report, function: Any, kept: int, mode: str | None
) -> None:
    compiled = torch.compile(function, mode=mode, dynamic=False)
    x, count = torch.randn(4, 4), torch.tensor(2)

    result, (code,) = run_and_get_code(compiled, x, count)
    torch.testing.assert_close(result, function(x, count))
    for number in (3, 3, 5):
        count.numpy()[...] = number
        torch.testing.assert_close(compiled(x, count), function(x, count))

    kept = kept if mode else 0  # it lies on the CPU here, where it costs nothing unless graphs are split
    assert (added.counts["kept_items"], added.failures) == (kept, {})
    assert (".item()" in code) == (not kept)
    said = [reason for reason in added.summary()["left_on_cpu"] if items.OTHER_USE in reason]
    assert bool(said) == (function is sized and mode is not None)
