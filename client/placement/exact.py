"""What the CPU computes of a graph's small inputs, where the GPU computes the same bits: masks from lengths, positions from an offset.

The GPU computes it, within what is captured, and only the inputs are sent. Left on the CPU it is a kernel of several threads at
every call, and a copy for each result. Taken is what has one right result whoever computes it: arithmetic of integers that wraps
around alike, comparisons of these, logic, choices between numbers of one type, and other shapes of all this. Rounding, division and
powers are not; `arithmetic.py` is about these. What a kernel computes of places alone, it computes in 32 bits, and numbers in it are
not rounded to 16: such are left, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from pygraphd.client import _torch
from pygraphd.client.placement import arithmetic, nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch.fx import Graph

aten, prims = torch.ops.aten, torch.ops.prims

MAX_BYTES = 64 << 20
"""A larger value is left where it is: on the way to it the GPU may need memory that the CPU's had."""
MAX_INPUT_BYTES = 16 << 10
"""Of all inputs that are sent for this."""

_WRAPPING = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.sub.Scalar),
        *(aten.mul.Scalar, aten.neg.default, aten.minimum.default, aten.maximum.default),
    }
)
"""Operators that are taken if all is of the wide integers: compilers differ in how narrow ones are widened on the way."""
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_OF_INTEGERS = frozenset(
    {
        *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
        *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
        *(aten.logical_and.default, aten.logical_or.default),
        *(aten.logical_xor.default, aten.logical_not.default),
        *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor),
        *(aten.bitwise_xor.Tensor, aten.bitwise_not.default),
        prims.convert_element_type.default,
    }
)
"""Operators that are taken if they are given nothing but integers and truth values, and make such."""
_SHAPES = frozenset(
    {
        *(aten.clone.default, nodes.FRESH, aten.view.default, aten.unsqueeze.default),
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

    `may_be_sent` tells of a node whether its value is small, and `takes` whether one may take a value from the GPU instead.
    """
    if arithmetic.is_backward(graph):
        return  # its forward may have saved on the GPU what this was compiled for on the CPU
    computed, late = _computed(graph, may_be_sent), arithmetic.after_first_write(graph)
    found = [use for use in _uses(computed) if use.taker not in late]
    uses = [use for use in found if _is_worth_it(use) and takes(use.taker, use.value)]
    uses = _of_inputs_that_are_sent(uses, computed, may_be_sent)
    for device in dict.fromkeys(use.device for use in uses):
        _change(graph, device, [use for use in uses if use.device == device])
    nodes.remove_unused(graph, [use.value for use in uses])


_Found = dict[Node, "int | None"]
"""What has the same bits on a GPU: None if an input is in it, else how large its integers are at most."""


def _computed(graph: Graph, may_be_sent: Callable[[Node], bool]) -> _Found:
    """Return what has the same bits on a GPU; inputs that may be sent are among it."""
    found: _Found = {}
    for node in graph.nodes:
        if nodes.is_mutating(node):
            break  # from here on an input may be another
        if not nodes.is_on_cpu(node):
            continue
        if node.op == "placeholder":
            if nodes.value(node).dtype in _INTEGERS and may_be_sent(node):
                found[node] = None
        elif nodes.has_static_layout(node) and (_is_constant(node) or _is_exact(node, found)):
            most = _most(node, found)
            if most is None or most < _MAX_WIDE:
                found[node] = most
    return found


def _is_constant(node: Node) -> bool:
    """Whether a node makes of numbers alone what the GPU makes of them, too."""
    if not arithmetic.makes_of_numbers(node):
        return False
    dtype = nodes.value(node).dtype
    if node.target is prims.iota.default:
        return dtype in _WIDE and all(type(each) is int for each in _counted(node))
    number: Any = node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]
    if dtype in _INTEGERS:
        return isinstance(number, int) and abs(number) < (_MAX_WIDE if dtype in _WIDE else _MAX_NARROW)
    if (
        dtype not in _AS_GIVEN
        or isinstance(number, complex)
        or (number == 0 and math.copysign(1, number) < 0)
    ):
        return False  # Triton 3.6 makes 0.0 of -0.0
    # Within a kernel a number is not rounded to a short type, and may have been to 32 bits on its way there.
    return dtype is torch.float32 or torch.tensor(number, dtype=_AS_GIVEN[dtype]).item() == number


def _counted(node: Node) -> tuple[Any, Any, Any]:
    return node.args[0], node.kwargs.get("start"), node.kwargs.get("step")


def _is_exact(node: Node, found: _Found) -> bool:
    """Whether a node's result has the same bits on both, if what it takes has."""
    taken = node.all_input_nodes
    if not taken or not all(each in found for each in taken):
        return False
    made, kinds = nodes.value(node).dtype, {nodes.value(each).dtype for each in taken}
    if node.target is aten.where.self:
        return kinds <= _INTEGERS or {nodes.value(each).dtype for each in node.args[1:]} == {made}
    if node.target in _SHAPES:
        return True
    if node.target in _WRAPPING:
        return {made, *kinds} <= _WIDE and _has_small_numbers(node)
    if node.target is prims.convert_element_type.default and kinds == {torch.bool}:
        return made in _AS_GIVEN or made in _INTEGERS
    return node.target in _OF_INTEGERS and {made, *kinds} <= _INTEGERS and _has_small_numbers(node)


def _most(node: Node, found: _Found) -> int | None:
    """Return how large integers are at most that no input is in."""
    given = (*node.args, *node.kwargs.values())  # a square is given one twice
    taken = [found[each] for each in given if isinstance(each, Node)]
    known = [each for each in taken if each is not None]
    if len(known) < len(taken):
        return None
    if not taken:
        return _most_made(node)
    numbers = [abs(each) for each in given if isinstance(each, int)]
    if node.target in _PRODUCTS:
        return math.prod([*known, *numbers])
    if node.target in _WRAPPING:  # and a factor of the second term may be among the numbers
        return sum(known) * max([1, *numbers]) + sum(numbers)
    return max([1, *known])


def _most_made(node: Node) -> int:
    if node.target is prims.iota.default:
        count, start, step = map(int, _counted(node))
        return max(abs(start), abs(start + step * max(0, count - 1)))
    number: Any = node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]
    return abs(int(number)) if isinstance(number, int) else 0


def _has_small_numbers(node: Node) -> bool:
    """Whether the numbers among a node's arguments are integers that all of its tensors can hold."""
    wide = all(nodes.value(each).dtype in _WIDE for each in node.all_input_nodes)
    numbers = [
        each for each in (*node.args, *node.kwargs.values()) if isinstance(each, int | float | complex)
    ]
    return all(isinstance(each, int) and abs(each) < (_MAX_WIDE if wide else _MAX_NARROW) for each in numbers)


def _uses(computed: _Found) -> Iterator[_Use]:
    """Yield who on a GPU takes what is computed of an input."""
    for value, most in computed.items():
        if most is None and value.op != "placeholder":
            for taker in value.users:
                if taker not in computed and nodes.lies_elsewhere(taker):
                    yield _Use(taker, value)


def _is_worth_it(use: _Use) -> bool:
    """Whether a use would cost a copy of a value with dimensions: PyTorch passes numbers to kernels without the host waiting."""
    copies = use.taker.target is nodes.COPY or use.taker.target in nodes.INDEXING
    value = nodes.value(use.value)
    return copies and value.dim() > 0 and value.is_contiguous() and value.nbytes <= MAX_BYTES


def _of_inputs_that_are_sent(
    uses: list[_Use], computed: _Found, may_be_sent: Callable[[Node], bool]
) -> list[_Use]:
    """Return the uses whose inputs will all be sent: else each would be copied, with the host waiting, in place of the value."""
    while True:
        gone = _unused_without(uses, computed)
        kept: list[_Use] = []
        inputs: set[Node] = set()
        for use in uses:
            its = {each for each in arithmetic.needed([use.value]) if each.op == "placeholder"}
            fits = sum(nodes.value(each).nbytes for each in inputs | its) <= MAX_INPUT_BYTES
            if fits and all(_will_be_sent(each, gone, may_be_sent) for each in its):
                kept.append(use)
                inputs |= its
        if len(kept) == len(uses):
            return kept
        uses = kept  # what is left for one may be what another's inputs are needed for


def _unused_without(uses: Sequence[_Use], computed: _Found) -> set[Node]:
    """Return what nobody takes any more once these uses have gone."""
    goes = {(use.taker, use.value) for use in uses}
    gone: set[Node] = set()
    for value in reversed(computed):
        if value.op != "placeholder" and all(user in gone or (user, value) in goes for user in value.users):
            gone.add(value)
    return gone


def _will_be_sent(value: Node, gone: Collection[Node], may_be_sent: Callable[[Node], bool]) -> bool:
    """Whether the CPU does nothing else with an input but what `arithmetic.py` deals with.

    Nor writes to it: a counter is another at every call, and what is computed of it may be the same at most.
    """
    waiting, seen = [value], {value}
    while waiting:
        each = waiting.pop()
        for user in each.users:
            if user in gone or user in seen or user.op == "output" or nodes.lies_elsewhere(user):
                continue
            if user.target not in arithmetic.ARITHMETIC or not may_be_sent(user):
                return False
            seen.add(user)
            waiting.append(user)
    return True


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
