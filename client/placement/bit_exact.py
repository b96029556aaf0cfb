"""Which of the values that the CPU computes of a graph's small inputs have the same bits if the GPU computes them; see `gpu_recompute.py`.

Arithmetic of integers that wraps around alike, comparisons of these, logic, choices between numbers of one type, and other shapes of
all this have one right result. What a kernel computes of places alone (`torch.arange`), it computes in 32 bits, whatever their type,
and leaves out that they are cut off to fewer; and numbers in it are not rounded to 16 bits. Such are no such values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from pygraphd.client.placement import fx_utils, hoist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.fx import Graph

aten, prims = torch.ops.aten, torch.ops.prims

MAX_INPUTS = 64
"""Of a value; one with more is left."""

_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar})
_WRAPPING = frozenset({*_PRODUCTS, *_SUMS, aten.neg.default, aten.minimum.default, aten.maximum.default})
"""Operators that are taken if all is of the wide integers: compilers differ in how narrow ones are widened on the way."""
_OF_BITS = frozenset(
    {aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default}
)
_OF_INTEGERS = frozenset(
    {
        *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
        *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
        *(aten.logical_and.default, aten.logical_or.default),
        *(aten.logical_xor.default, aten.logical_not.default),
        *_OF_BITS,
    }
)
"""Operators that are taken if they are given nothing but integers and truth values, and make such."""
_SHAPES = frozenset(
    {
        *(aten.clone.default, fx_utils.FRESH, aten.view.default, aten.unsqueeze.default),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default),
        *(aten.slice.Tensor, aten.select.int),
    }
)
"""Operators that make no number."""
_WIDE = frozenset({torch.int64, torch.int32})
_INTEGERS = frozenset({*_WIDE, torch.int16, torch.int8, torch.uint8, torch.bool})
_AS_GIVEN = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float32,
}
"""Types of floats, and what a number of each has to be one of to reach a kernel as it is."""
_MAX_WIDE, _MAX_NARROW = 1 << 31, 1 << 7
"""From here on a number may meet a tensor that cannot hold it. And Inductor's kernels compute in 32 bits what is made of places alone."""


@dataclass(frozen=True, slots=True)
class Exact:
    """What has the same bits on a GPU: the inputs that are in it, and, if a kernel computes it of places, how large it is at most."""

    inputs: frozenset[Node]
    places: int | None


def exact_values(graph: Graph, may_be_sent: Callable[[Node], bool]) -> dict[Node, Exact]:
    """Return what has the same bits on a GPU; inputs that may be sent are among it."""
    found: dict[Node, Exact] = {}
    for node in graph.nodes:
        if fx_utils.is_mutating(node):
            break  # from here on an input may be another
        if fx_utils.is_on_cpu(node) and (each := _found(node, found, may_be_sent)) is not None:
            found[node] = each
    return found


def _found(node: Node, found: Mapping[Node, Exact], may_be_sent: Callable[[Node], bool]) -> Exact | None:
    if node.op == "placeholder":
        sent = fx_utils.value(node).dtype in _INTEGERS and may_be_sent(node)
        return Exact(frozenset({node}), None) if sent else None
    if not fx_utils.has_static_layout(node):
        return None
    if hoist.makes_of_numbers(node):
        return Exact(frozenset(), _largest_made(node)) if _is_constant(node) else None
    taken = node.all_input_nodes
    if not taken or not all(each in found for each in taken) or not _is_operator(node, found):
        return None
    places = _largest(node, found)
    inputs = frozenset[Node]().union(*(found[each].inputs for each in taken))
    return Exact(inputs, places) if (places or 0) < _MAX_WIDE and len(inputs) <= MAX_INPUTS else None


def _is_constant(node: Node) -> bool:
    """Whether a node makes of numbers alone what the GPU makes of them, too."""
    dtype = fx_utils.value(node).dtype
    if node.target is prims.iota.default:
        counted = dtype in _WIDE and all(type(each) is int for each in _counted(node))
        return counted and _largest_made(node) < _MAX_WIDE
    number: Any = _number(node)
    if dtype in _INTEGERS:
        return isinstance(number, int) and abs(number) < (_MAX_WIDE if dtype in _WIDE else _MAX_NARROW)
    if dtype not in _AS_GIVEN or isinstance(number, complex):
        return False
    # Within a kernel a number is not rounded to a short type, and may have been to 32 bits on its way there. Triton 3.6 makes 0.0 of -0.0.
    rounded = torch.tensor(number, dtype=_AS_GIVEN[dtype]).item()
    if rounded == 0:
        return number == 0 and math.copysign(1, number) > 0
    is_rounded_alike = dtype is torch.float32 and isinstance(number, float) and math.isfinite(rounded)
    return rounded == number or is_rounded_alike


def _counted(node: Node) -> tuple[Any, Any, Any]:
    return node.args[0], node.kwargs.get("start"), node.kwargs.get("step")


def _number(node: Node) -> object:
    return node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]


def _is_operator(node: Node, found: Mapping[Node, Exact]) -> bool:
    """Whether a node's result has the same bits on both, if what it takes has."""
    taken = node.all_input_nodes
    made, kinds = fx_utils.value(node).dtype, {fx_utils.value(each).dtype for each in taken}
    if node.target is aten.where.self:
        return kinds <= _INTEGERS or {fx_utils.value(each).dtype for each in node.args[1:]} == {made}
    if node.target in _SHAPES:
        return True
    if node.target in _WRAPPING:
        return {made, *kinds} <= _WIDE and not _multiplies(node) and _has_small_numbers(node)
    if node.target is prims.convert_element_type.default:
        if kinds == {torch.bool}:
            return made in _AS_GIVEN or made in _INTEGERS
        # Inductor takes places for as wide as they were: it would leave out that they are cut off.
        return kinds <= _INTEGERS and made in (_INTEGERS if found[taken[0]].places is None else _WIDE)
    return node.target in _OF_INTEGERS and {made, *kinds} <= _INTEGERS and _has_small_numbers(node)


def _multiplies(node: Node) -> bool:
    """Whether a sum multiplies its second term, by what may come third or be named."""
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return node.target in _SUMS and alpha != 1


def _largest(node: Node, found: Mapping[Node, Exact]) -> int | None:
    """Return how large a result is at most that a kernel computes of places; None if one of its values was loaded."""
    given = node.args[1:] if node.target is aten.where.self else node.args  # a square is given one twice
    known = [found[each].places for each in given if isinstance(each, Node)]
    if fx_utils.value(node).dtype is torch.bool:
        return 1
    if None in known:
        return None
    sizes = [each for each in known if each is not None]
    sizes += [abs(each) for each in given[:2] if isinstance(each, int)] if node.target in _WRAPPING else []
    if node.target in _PRODUCTS:
        return math.prod(sizes)
    if node.target in _SUMS:
        return sum(sizes)
    # What is made of bits has no more of them, and -1 of 0 has one.
    return (1 << max(1, *sizes).bit_length()) if node.target in _OF_BITS else max(sizes)


def _largest_made(node: Node) -> int:
    if node.target is prims.iota.default:
        count, start, step = map(int, _counted(node))
        return max(abs(start), abs(start + step * max(0, count - 1)))
    number = _number(node)
    return abs(number) if isinstance(number, int) else 0


def _has_small_numbers(node: Node) -> bool:
    """Whether the numbers among a node's arguments are integers that all of its tensors can hold."""
    wide = all(fx_utils.value(each).dtype in _WIDE for each in node.all_input_nodes)
    numbers = [
        each for each in (*node.args, *node.kwargs.values()) if isinstance(each, int | float | complex)
    ]
    return all(isinstance(each, int) and abs(each) < (_MAX_WIDE if wide else _MAX_NARROW) for each in numbers)
