"""Finds CPU values, computed from small inputs, that have the same bits when the GPU computes them (for `gpu_recompute.py`).

Accepted: wrapping integer arithmetic, comparisons, logic, `where` between numbers of one dtype, and changes of shape. Refused, since
Inductor's kernels differ there: index values (`torch.arange`) beyond 32 bits or cast to a narrower dtype, and numbers that a 16-bit float
would round.
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
"""The most inputs that a value may depend on."""

_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar})
_WRAPPING = frozenset({*_PRODUCTS, *_SUMS, aten.neg.default, aten.minimum.default, aten.maximum.default})
"""Operators that are taken if all dtypes are 32 or 64-bit integers: compilers widen narrower ones in different ways."""
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
"""Operators that are taken if all inputs and the result are integers or booleans."""
_SHAPES = frozenset(
    {
        *(aten.clone.default, fx_utils.FRESH, aten.view.default, aten.unsqueeze.default),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default),
        *(aten.slice.Tensor, aten.select.int),
    }
)
"""Operators that change shapes only."""
_WIDE = frozenset({torch.int64, torch.int32})
_INTEGERS = frozenset({*_WIDE, torch.int16, torch.int8, torch.uint8, torch.bool})
_AS_GIVEN = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float32,
}
"""For each float dtype: the dtype that must hold a number exactly, or a kernel receives another number."""
_MAX_WIDE, _MAX_NARROW = 1 << 31, 1 << 7
"""Bounds of the absolute values of constants, for wide and narrow integers. Inductor's kernels compute index values in 32 bits."""


@dataclass(frozen=True, slots=True)
class BitExact:
    """A value with the same bits on both devices: its inputs, and a bound of it if it follows from indices and constants alone."""

    inputs: frozenset[Node]
    index_bound: int | None


def bit_exact_values(graph: Graph, may_be_sent: Callable[[Node], bool]) -> dict[Node, BitExact]:
    """Return the CPU values of a graph that have the same bits on a GPU, with the inputs that `may_be_sent` accepts."""
    found: dict[Node, BitExact] = {}
    for node in graph.nodes:
        if fx_utils.is_mutating(node):
            break  # an input may have changed from here on
        if fx_utils.is_on_cpu(node) and (each := _find(node, found, may_be_sent)) is not None:
            found[node] = each
    return found


def _find(node: Node, found: Mapping[Node, BitExact], may_be_sent: Callable[[Node], bool]) -> BitExact | None:
    if node.op == "placeholder":
        sent = fx_utils.fake(node).dtype in _INTEGERS and may_be_sent(node)
        return BitExact(frozenset({node}), None) if sent else None
    if not fx_utils.has_static_layout(node):
        return None
    if hoist.is_constant_factory(node):
        return BitExact(frozenset(), _constant_bound(node)) if _is_constant(node) else None
    taken = node.all_input_nodes
    if not taken or not all(each in found for each in taken) or not _is_exact_operator(node, found):
        return None
    bound = _index_bound(node, found)
    inputs = frozenset[Node]().union(*(found[each].inputs for each in taken))
    return BitExact(inputs, bound) if (bound or 0) < _MAX_WIDE and len(inputs) <= MAX_INPUTS else None


def _is_constant(node: Node) -> bool:
    """Return whether a node that makes a tensor from numbers alone makes the same bits on a GPU."""
    dtype = fx_utils.fake(node).dtype
    if node.target is prims.iota.default:
        counted = dtype in _WIDE and all(type(each) is int for each in _iota_arguments(node))
        return counted and _constant_bound(node) < _MAX_WIDE
    number: Any = _constant_value(node)
    if dtype in _INTEGERS:
        return isinstance(number, int) and abs(number) < (_MAX_WIDE if dtype in _WIDE else _MAX_NARROW)
    if dtype not in _AS_GIVEN or isinstance(number, complex):
        return False
    # A kernel receives a number rounded to 32 bits, and does not round it to 16. Triton 3.6 turns -0.0 into 0.0.
    rounded = torch.tensor(number, dtype=_AS_GIVEN[dtype]).item()
    if rounded == 0:
        return number == 0 and math.copysign(1, number) > 0
    is_rounded_alike = dtype is torch.float32 and isinstance(number, float) and math.isfinite(rounded)
    return rounded == number or is_rounded_alike


def _iota_arguments(node: Node) -> tuple[Any, Any, Any]:
    return node.args[0], node.kwargs.get("start"), node.kwargs.get("step")


def _constant_value(node: Node) -> object:
    return node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]


def _is_exact_operator(node: Node, found: Mapping[Node, BitExact]) -> bool:
    """Return whether a node's result has the same bits on both devices, given that its inputs have."""
    taken = node.all_input_nodes
    made, kinds = fx_utils.fake(node).dtype, {fx_utils.fake(each).dtype for each in taken}
    if node.target is aten.where.self:
        return kinds <= _INTEGERS or {fx_utils.fake(each).dtype for each in node.args[1:]} == {made}
    if node.target in _SHAPES:
        return True
    if node.target in _WRAPPING:
        return {made, *kinds} <= _WIDE and not _has_alpha(node) and _has_narrow_scalars(node)
    if node.target is prims.convert_element_type.default:
        if kinds == {torch.bool}:
            return made in _AS_GIVEN or made in _INTEGERS
        # Inductor drops a cast of index values to a narrower integer.
        return kinds <= _INTEGERS and made in (_INTEGERS if found[taken[0]].index_bound is None else _WIDE)
    return node.target in _OF_INTEGERS and {made, *kinds} <= _INTEGERS and _has_narrow_scalars(node)


def _has_alpha(node: Node) -> bool:
    """Return whether a sum has a factor `alpha` other than 1 on its second term."""
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return node.target in _SUMS and alpha != 1


def _index_bound(node: Node, found: Mapping[Node, BitExact]) -> int | None:
    """Return a bound of the absolute value of a node's result; None if any of its inputs is loaded from memory."""
    given = node.args[1:] if node.target is aten.where.self else node.args  # a square has one input twice
    known = [found[each].index_bound for each in given if isinstance(each, Node)]
    if fx_utils.fake(node).dtype is torch.bool:
        return 1
    if None in known:
        return None
    sizes = [each for each in known if each is not None]
    sizes += [abs(each) for each in given[:2] if isinstance(each, int)] if node.target in _WRAPPING else []
    if node.target in _PRODUCTS:
        return math.prod(sizes)
    if node.target in _SUMS:
        return sum(sizes)
    # Bit operations need no more bits than their inputs, and at least one: the inverse of 0 is -1.
    return (1 << max(1, *sizes).bit_length()) if node.target in _OF_BITS else max(sizes)


def _constant_bound(node: Node) -> int:
    if node.target is prims.iota.default:
        count, start, step = map(int, _iota_arguments(node))
        return max(abs(start), abs(start + step * max(0, count - 1)))
    number = _constant_value(node)
    return abs(number) if isinstance(number, int) else 0


def _has_narrow_scalars(node: Node) -> bool:
    """Return whether all scalars among a node's arguments are integers that each of its tensors can hold."""
    wide = all(fx_utils.fake(each).dtype in _WIDE for each in node.all_input_nodes)
    numbers = [
        each for each in (*node.args, *node.kwargs.values()) if isinstance(each, int | float | complex)
    ]
    return all(isinstance(each, int) and abs(each) < (_MAX_WIDE if wide else _MAX_NARROW) for each in numbers)
