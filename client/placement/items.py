"""`.item()` whose value only meets tensors on the GPU, element by element: they take the tensor, and nobody waits for its value.

Such a read cuts a graph, and the value is an integer input of what comes after it, which PyTorch records anew for each. It is in a
graph only if `torch._dynamo.config.capture_scalar_outputs` is set. PyTorch keeps most floats as tensors itself; integers come here.
A number is changed only where a tensor without dimensions computes the same bits: it meets tensors of some dimensions, of 32-bit
floats or 64-bit types. Whoever else takes the number (a size, a condition, another number) reads it on the host, and nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client import _torch
from pygraphd.client.placement import nodes
from pygraphd.client.placement.nodes import Moved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Graph, Node

READ_HERE = "the CPU goes on with the number"
OTHER_USE = "it is a size, or taken in another way in which a tensor is not the same"
NOT_PLAIN = "it is a number of a kind, or from a tensor, that is not known"

_ITEM = torch.ops.aten._local_scalar_dense.default
_WIDE = frozenset({torch.float32, torch.float64, torch.int64})
"""What meets a number: in narrower types, a scalar is rounded after the operation, and a tensor may be before."""
_NUMBERS = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


def keep_items(graph: Graph, *, split: bool) -> Moved:
    """Have tensors be taken in place of their numbers; `split`: also those on the CPU, which cost nothing where nothing is captured."""
    uses = 0
    left: list[str] = []
    for node in _items(graph):
        if nodes.is_on_cpu(node.args[0]) and not split:
            continue
        if reason := _why_not(node):
            left.append(_said(node, reason))
        else:
            uses += len(node.users)
            _keep(graph, node)
    return Moved(uses, tuple(left))


def all_left(graph: Graph, reason: str) -> tuple[str, ...]:
    """Return what is to be said of a graph that is left as it is."""
    return tuple(_said(node, reason) for node in _items(graph))


def _said(node: Node, reason: str) -> str:
    return f"{node.target} reads a value on the CPU: {reason}{nodes.where(node)}"


def _items(graph: Graph) -> Iterator[Node]:
    """Yield the reads of values that the GPU has or takes."""
    for node in graph.find_nodes(op="call_function", target=_ITEM):
        if nodes.lies_elsewhere(node.args[0]) or any(nodes.lies_elsewhere(user) for user in node.users):
            yield node


def _why_not(node: Node) -> str | None:
    value = nodes.value(node.args[0])
    if value.dtype not in _NUMBERS or value.layout is not torch.strided:
        return NOT_PLAIN
    return next((reason for user in node.users if (reason := _why_not_use(node, user))), None)


def _why_not_use(node: Node, user: Node) -> str | None:
    if not nodes.lies_elsewhere(user):
        return READ_HERE
    if not nodes.is_pointwise(user) or user.kwargs:
        return OTHER_USE
    kinds = _torch.argument_kinds(user.target)
    if any(each is node and kind != "Tensor" for each, kind in zip(user.args, kinds, strict=False)):
        return OTHER_USE
    value = nodes.value(node.args[0])
    if nodes.is_elsewhere(value.device) and value.device != nodes.device(user):
        return OTHER_USE
    tensors = [nodes.value(each) for each in user.all_input_nodes if each is not node]
    return None if tensors and all(_computes_the_same(value, each) for each in tensors) else OTHER_USE


def _computes_the_same(number: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor takes a number alike, be it one or a tensor: a float that meets integers makes other floats of them."""
    same_kind = tensor.is_floating_point() or not number.is_floating_point()
    return tensor.dim() > 0 and tensor.dtype in _WIDE and same_kind


def _keep(graph: Graph, node: Node) -> None:
    value: Any = node.args[0]
    number = value
    if nodes.value(value).dim():
        with graph.inserting_before(node):
            number = graph.call_function(torch.ops.aten.view.default, (value, []))
        number.meta["val"] = nodes.value(value).view([])
    node.replace_all_uses_with(number)
    graph.erase_node(node)
