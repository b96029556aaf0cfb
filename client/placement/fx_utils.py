"""Queries and edits of FX nodes that the placement passes share, and the messages for values that they leave on the CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, Node

from pygraphd.client.backend import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterable

COPY = torch.ops.prims.device_put.default
"""The operator that copies a tensor to a device."""
FRESH = torch.ops.aten.lift_fresh_copy.default
"""The operator that copies a tensor on its device. Inductor removes a plain clone, but not this."""
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
RUN_TIME_SIZE = "its size is known at run time only"
A_MASK = "it is a mask, and the number of elements that it selects is known at run time only"
_FILE_AND_LINE = re.compile(r'^\s*File "(.*?)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of one pass over a graph: the number of uses it changed, and a message for each CPU value that it left."""

    uses: int
    left: tuple[str, ...]
    users: frozenset[Node] = field(default=frozenset(), compare=False)
    """The nodes on the GPU whose CPU inputs the pass has handled, changed or not."""


def skip_message(user: Node, reason: str) -> str:
    """Return the message for a node that still takes a value from the CPU, for `reason`."""
    return f"{user.target} takes a CPU value to the GPU: {reason}{source_line(user)}"


def source_line(node: Node) -> str:
    """Return the source line of a node as ` (file:line)`, or '': the innermost outside of PyTorch, else the innermost."""
    found = _FILE_AND_LINE.findall(str(node.meta.get("stack_trace") or ""))
    if not found:
        return ""
    # Dynamo inlines torch's layers and distributions, whose lines tell the user nothing.
    file, number = next(
        (each for each in reversed(found) if not torch_private.is_own_file(each[0])), found[-1]
    )
    return f" ({file}:{number})"


def fake(node: object) -> torch.Tensor:
    """Return the fake tensor of a node, which must have one."""
    found: torch.Tensor = node.meta["val"]  # type: ignore[attr-defined]
    return found


def device(node: Node) -> torch.device | None:
    """Return the device of a node's tensor; None if its value is no tensor."""
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a CUDA device."""
    return str(device.type) == "cuda"


def is_on_gpu(node: object) -> bool:
    """Return whether any tensor that a node returns is on a CUDA device."""
    values = node.meta.get("val")  # type: ignore[attr-defined]
    return any(
        isinstance(each, torch.Tensor) and is_gpu(each.device)
        for each in (values if isinstance(values, list | tuple) else [values])
    )


def is_pointwise(node: Node) -> bool:
    """Return whether a node is element-wise. Element-wise operators also take scalars from the CPU."""
    operator = torch_private.operator_of(node)
    return (
        operator is not None
        and operator.namespace in {"aten", "prims"}
        and torch.Tag.pointwise in operator.tags
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def is_on_cpu(node: Node) -> bool:
    """Return whether a node's value is a tensor on the CPU."""
    found = device(node)
    return found is not None and found.type == "cpu"


def has_static_layout(node: Node) -> bool:
    """Return whether sizes and strides of a node's tensor are known at compilation."""
    tensor = fake(node)
    return all(type(each) is int for each in (*tensor.size(), *tensor.stride()))


def has_same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, sizes and strides."""
    return (one.dtype, one.size(), one.stride()) == (other.dtype, other.size(), other.stride())


def is_mutating(node: Node) -> bool:
    """Return whether a node writes to one of its inputs."""
    operator = torch_private.operator_of(node)
    return operator is not None and torch_private.is_mutable(operator)


def add_slice(graph: Graph, together: Node, start: int, like: torch.Tensor) -> Node:
    """Add nodes at the insertion point that cut a tensor of the form of `like` out of a 1-d tensor, from element `start` on."""
    memory, end = fake(together), start + like.numel()
    flat = graph.call_function(torch.ops.aten.slice.Tensor, (together, 0, start, end))
    flat.meta["val"] = torch_private.fake_on(memory.device, like.new_empty(like.numel()))
    shaped = graph.call_function(torch.ops.aten.view.default, (flat, list(like.size())))
    shaped.meta["val"] = torch_private.fake_on(memory.device, like.new_empty(like.size()))
    return shaped


def replace_use(graph: Graph, user: Node, value: Node, source: Node) -> None:
    """Replace `value` by `source`, which is on the GPU, in one user: a copy to the GPU, an index or another argument."""
    if user.target is COPY:
        # A copy all the same: what the graph returns is the user's to change.
        with graph.inserting_before(user):
            copy = graph.call_function(FRESH, (source,))
        copy.meta = dict(user.meta)
        user.replace_all_uses_with(copy)
        graph.erase_node(user)
    elif user.target in INDEXING:
        tensor, indices, *more = user.args
        assert isinstance(indices, list | tuple)
        user.args = (tensor, [source if each is value else each for each in indices], *more)
    else:
        user.replace_input_with(value, source)


def remove_unused(graph: Graph, unused: Iterable[Node]) -> None:
    """Erase those of the given nodes that have no users, and then their inputs likewise; placeholders stay."""
    # Not `eliminate_dead_code`, which looks through the whole graph each time.
    waiting = list(unused)
    gone: set[Node] = set()
    while waiting:
        each = waiting.pop()
        if each.users or each.op == "placeholder" or each.graph is not graph or each in gone:
            continue
        waiting += each.all_input_nodes
        graph.erase_node(each)
        gone.add(each)


def is_on_a_stream(node: Node) -> bool:
    """Return whether a node runs on a stream of the program, or acts on one."""
    called = torch_private.operator_of(node)
    custom = node.meta.get("custom")
    has_stream = isinstance(custom, dict) and custom.get("stream") is not None
    return has_stream or (called is not None and called.namespace == "streams")
