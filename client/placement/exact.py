"""What the CPU computes of a graph's small inputs, where the GPU computes the same bits: masks from lengths, positions from an offset.

The GPU computes it, within what is captured, and only the inputs are sent. Left on the CPU it is a kernel of several threads at
every call, and a copy for each result. Taken is what has one right result whoever computes it: arithmetic of integers that wraps
around alike, comparisons of these, logic, choices between given numbers, and other shapes of all this. Rounding, division and
powers are not; `arithmetic.py` is about these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from pygraphd.client import _torch
from pygraphd.client.placement import arithmetic, nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Graph

aten, prims = torch.ops.aten, torch.ops.prims

MAX_BYTES = 64 << 20
"""A larger value is left where it is: on the way to it the GPU may need memory that the CPU's had."""

_WRAPPING = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.sub.Scalar),
        *(aten.mul.Scalar, aten.neg.default),
    }
)
"""Operators that are taken if all is of the wide integers: compilers differ in how narrow ones are widened on the way."""
_OF_INTEGERS = frozenset(
    {
        *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
        *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
        *(aten.minimum.default, aten.maximum.default),
        *(aten.logical_and.default, aten.logical_or.default),
        *(aten.logical_xor.default, aten.logical_not.default),
        *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor),
        *(aten.bitwise_xor.Tensor, aten.bitwise_not.default),
        prims.convert_element_type.default,
    }
)
"""Operators that are taken if they are given nothing but integers and truth values, and make such."""
_OF_ANY = frozenset(
    {
        *(aten.where.self, aten.clone.default, nodes.FRESH, aten.view.default, aten.unsqueeze.default),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default),
        *(aten.slice.Tensor, aten.select.int),
    }
)
"""Operators that make no new number."""
_WIDE = frozenset({torch.int64, torch.int32})
_INTEGERS = frozenset({*_WIDE, torch.int16, torch.int8, torch.uint8, torch.bool})
_MAX_NUMBER = 1 << 31
"""A greater one may meet a tensor that cannot hold it."""


@dataclass(frozen=True, slots=True)
class _Use:
    """Who on the GPU takes what the CPU computes."""

    taker: Node
    value: Node

    @property
    def device(self) -> torch.device:
        return nodes.value(self.taker).device


def compute_there(
    graph: Graph, may_be_sent: Callable[[Node], bool], takes: Callable[[Node, Node], bool]
) -> None:
    """Have the GPU compute all of this kind that it takes, from copies of the inputs.

    `may_be_sent` tells of an input whether it is small, and `takes` of a node whether it may take a value from the GPU instead.
    """
    if arithmetic.is_backward(graph):
        return  # its forward may have saved on the GPU what this was compiled for on the CPU
    late = arithmetic.after_first_write(graph)
    found = [use for use in _uses(_computed(graph, may_be_sent)) if use.taker not in late]
    uses = [use for use in found if _is_worth_it(use) and takes(use.taker, use.value)]
    for device in dict.fromkeys(use.device for use in uses):
        _change(graph, device, [use for use in uses if use.device == device])
    nodes.remove_unused(graph, [use.value for use in uses])


def _computed(graph: Graph, may_be_sent: Callable[[Node], bool]) -> dict[Node, bool]:
    """Return what has the same bits on a GPU, and of each whether an input is in it; inputs that may be sent are."""
    found: dict[Node, bool] = {}
    for node in graph.nodes:
        if nodes.is_mutating(node):
            break  # from here on an input may be another
        if not nodes.is_on_cpu(node):
            continue
        if node.op == "placeholder":
            if nodes.value(node).dtype in _INTEGERS and may_be_sent(node):
                found[node] = True
        elif nodes.has_static_layout(node) and (_is_constant(node) or _is_exact(node, found)):
            found[node] = any(found[each] for each in node.all_input_nodes)
    return found


def _is_constant(node: Node) -> bool:
    """Whether a node makes of numbers alone what the GPU makes of them, too."""
    counts = node.target is prims.iota.default
    return arithmetic.makes_of_numbers(node) and (not counts or nodes.value(node).dtype in _WIDE)


def _is_exact(node: Node, found: dict[Node, bool]) -> bool:
    """Whether a node's result has the same bits on both, if what it takes has."""
    taken = node.all_input_nodes
    if not taken or not all(each in found for each in taken):
        return False
    if node.target in _OF_ANY:
        return True
    made, kinds = nodes.value(node).dtype, {nodes.value(each).dtype for each in taken}
    if node.target in _WRAPPING:
        return {made, *kinds} <= _WIDE and _has_small_numbers(node)
    if node.target is prims.convert_element_type.default and kinds == {torch.bool}:
        return not made.is_complex
    return node.target in _OF_INTEGERS and {made, *kinds} <= _INTEGERS and _has_small_numbers(node)


def _has_small_numbers(node: Node) -> bool:
    """Whether the numbers among a node's arguments are integers that any wide type holds."""
    numbers = [
        each for each in (*node.args, *node.kwargs.values()) if isinstance(each, int | float | complex)
    ]
    return all(isinstance(each, int) and abs(each) < _MAX_NUMBER for each in numbers)


def _uses(computed: dict[Node, bool]) -> Iterator[_Use]:
    """Yield who on a GPU takes what is computed of an input."""
    for value, is_of_input in computed.items():
        if is_of_input and value.op != "placeholder":
            for taker in value.users:
                if taker not in computed and nodes.lies_elsewhere(taker):
                    yield _Use(taker, value)


def _is_worth_it(use: _Use) -> bool:
    """Whether a use would cost a copy of a value with dimensions: PyTorch passes numbers to kernels without the host waiting."""
    copies = use.taker.target is nodes.COPY or use.taker.target in nodes.INDEXING
    value = nodes.value(use.value)
    return copies and value.dim() > 0 and value.is_contiguous() and value.nbytes <= MAX_BYTES


def _change(graph: Graph, device: torch.device, uses: Sequence[_Use]) -> None:
    """Change one use after the other: whatever ends this early leaves a graph that computes the same."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    there: dict[Node, Node] = {}
    with graph.inserting_before(first):
        for node in arithmetic.needed(use.value for use in uses):
            there[node] = (
                _copied(graph, node, device)
                if node.op == "placeholder"
                else _made(graph, node, device, there)
            )
    for use in uses:
        nodes.take(graph, use.taker, use.value, there[use.value])


def _copied(graph: Graph, value: Node, device: torch.device) -> Node:
    copy = graph.call_function(nodes.COPY, (value, device))
    copy.meta = {"val": _torch.fake_on(device, nodes.value(value))}
    # Whoever is told of the copy is told of the line of the user's that made it necessary.
    if trace := next((user.meta["stack_trace"] for user in value.users if "stack_trace" in user.meta), None):
        copy.meta["stack_trace"] = trace
    return copy


def _made(graph: Graph, node: Node, device: torch.device, there: dict[Node, Node]) -> Node:
    made = graph.node_copy(node, lambda taken: there[taken])
    made.meta["val"] = _torch.fake_on(device, nodes.value(node))
    if not node.all_input_nodes:
        made.kwargs = {**made.kwargs, "device": device}
    return made
