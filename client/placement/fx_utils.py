"""What the rules ask of a graph's nodes, and what they say of those that they leave alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from pygraphd.client.backend import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Graph

COPY = torch.ops.prims.device_put.default
"""Copies a tensor to a device."""
FRESH = torch.ops.aten.lift_fresh_copy.default
"""Copies a tensor to where it is. Inductor takes a plain clone out again, and this not."""
INDEXING = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten._unsafe_index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten._unsafe_index_put.default,
    }
)
"""Operators whose second argument is a list of indices."""
INDEX_TYPES = frozenset({torch.int64, torch.int32})


@dataclass(frozen=True, slots=True)
class Moved:
    """What a rule did to a graph: how many uses it changed, and for each CPU value that it left the reason."""

    uses: int
    left: tuple[str, ...]
    takers: frozenset[Node] = field(default=frozenset(), compare=False)
    """The nodes that take any of these values, or took, of a rule for numbers."""
    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """By the name of what sends values, the user's line that takes each."""


def said(taker: Node, reason: str) -> str:
    """Return what is to be said of a node that goes on taking a value from the CPU."""
    return f"{taker.target} takes a CPU value to the GPU: {reason}{where(taker)}"


def where(node: Node) -> str:
    """Return the user's line that a node stems from, if that is known; of what is PyTorch's alone, PyTorch's."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    places = [_place(line) for line in lines if line.startswith("File ")]
    if not places:
        return ""
    file, number = next(
        (each for each in reversed(places) if not torch_private.is_own_file(each[0])), places[-1]
    )
    return f" ({file}:{number})"


def _place(line: str) -> tuple[str, str]:
    file, _, rest = line.removeprefix('File "').partition('", line ')
    return file, rest.partition(",")[0]


def where_taken(node: Node) -> str:
    """Return the first of the user's lines that take what a node gives, if that is known."""
    return next(filter(None, map(where, node.users)), "")


def value(node: object) -> torch.Tensor:
    """Return what stands for a node's tensor, which it must have."""
    found: torch.Tensor = node.meta["val"]  # type: ignore[attr-defined]
    return found


def device(node: Node) -> torch.device | None:
    """Return where a node's tensor lies; None if it is no tensor."""
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def is_elsewhere(device: torch.device) -> bool:
    """Whether a device is one whose work is captured, and runs while the CPU goes on."""
    return str(device.type) == "cuda"


def lies_elsewhere(node: object) -> bool:
    """Whether any of what a node gives lies on such a device."""
    values = node.meta.get("val")  # type: ignore[attr-defined]
    return any(
        isinstance(each, torch.Tensor) and is_elsewhere(each.device)
        for each in (values if isinstance(values, list | tuple) else [values])
    )


def is_pointwise(node: Node) -> bool:
    """Whether a node computes each element from one of each tensor; a scalar may come from the CPU then."""
    operator = torch_private.operator_of(node)
    return (
        operator is not None
        and operator.namespace in {"aten", "prims"}
        and torch.Tag.pointwise in operator.tags
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def is_on_cpu(node: Node) -> bool:
    """Whether a node's tensor lies on the CPU."""
    found = device(node)
    return found is not None and found.type == "cpu"


def has_static_layout(node: Node) -> bool:
    """Whether sizes and strides of a node's tensor are known when it is compiled."""
    tensor = value(node)
    return all(type(each) is int for each in (*tensor.size(), *tensor.stride()))


def is_mutating(node: Node) -> bool:
    """Whether a node writes to what it is given."""
    operator = torch_private.operator_of(node)
    return operator is not None and torch_private.is_mutable(operator)


def part(graph: Graph, together: Node, start: int, like: torch.Tensor) -> Node:
    """Add what takes a value like another out of a tensor of one dimension, at the place where nodes are being inserted."""
    memory, end = value(together), start + like.numel()
    flat = graph.call_function(torch.ops.aten.slice.Tensor, (together, 0, start, end))
    flat.meta["val"] = torch_private.fake_on(memory.device, like.new_empty(like.numel()))
    shaped = graph.call_function(torch.ops.aten.view.default, (flat, list(like.size())))
    shaped.meta["val"] = torch_private.fake_on(memory.device, like.new_empty(like.size()))
    return shaped


def replace_by_copy(graph: Graph, taker: Node, source: Node) -> None:
    """Have a copy of `source`, which is there already, take the place of one of the same value to the GPU."""
    # A copy all the same: what the graph returns is the user's to change.
    with graph.inserting_before(taker):
        copy = graph.call_function(FRESH, (source,))
    copy.meta = dict(taker.meta)
    taker.replace_all_uses_with(copy)
    graph.erase_node(taker)


def replace_index(taker: Node, value: Node, source: Node) -> None:
    """Have a node take `source` as its index wherever it takes `value`."""
    tensor, indices, *more = taker.args
    assert isinstance(indices, list | tuple)
    taker.args = (tensor, [source if each is value else each for each in indices], *more)


def take(graph: Graph, taker: Node, value: Node, source: Node) -> None:
    """Have a node take `source`, which is on the GPU, in place of `value`."""
    if taker.target is COPY:
        replace_by_copy(graph, taker, source)
    elif taker.target in INDEXING:
        replace_index(taker, value, source)
    else:
        taker.replace_input_with(value, source)


def remove_unused(graph: Graph, unused: Iterable[Node]) -> None:
    """Remove those of some nodes that nobody uses any more, and what was there for them alone; inputs stay."""
    waiting = list(unused)
    gone: set[Node] = set()
    while waiting:
        each = waiting.pop()
        if each.users or each.op == "placeholder" or each.graph is not graph or each in gone:
            continue
        waiting += each.all_input_nodes
        graph.erase_node(each)
        gone.add(each)
