"""What the CPU computes of a graph's small inputs: it stays there, goes to the beginning of the graph, and only its results are sent.

A bias correction from a step counter, the sign of a temperature, a table of distances from a position. Left where it is, PyTorch
copies each result with the host waiting, or computes on the GPU what the CPU then has to wait for (a counter that is changed in
place). The results of one type are sent as one value, for each costs the host time. See `inputs.py` for who may take them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.fx import Graph

aten, prims = torch.ops.aten, torch.ops.prims

ARITHMETIC = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode),
        *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar),
        *(aten.remainder.Scalar, aten.remainder.Tensor, aten.neg.default, aten.reciprocal.default),
        *(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar),
        *(aten.sqrt.default, aten.rsqrt.default, aten.exp.default, aten.log.default),
        *(aten.sign.default, aten.abs.default, aten.where.self),
        *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
        *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
        *(aten.minimum.default, aten.maximum.default, aten.clamp.default),
        *(aten.clamp_min.default, aten.clamp_max.default),
        *(prims.convert_element_type.default, aten.unsqueeze.default, aten.view.default),
        *(aten.clone.default, fx_utils.FRESH),
    }
)
"""Operators whose nodes may be moved to the beginning of a graph. All are pure, and take little time for few numbers."""
_MAKERS = frozenset({aten.full.default, aten.scalar_tensor.default, prims.iota.default})
"""Operators that make a tensor of numbers alone."""


@dataclass(slots=True)
class Group:
    """Inputs on the CPU, what is computed of them there, and who takes any of it."""

    inputs: dict[Node, None] = field(default_factory=dict)
    computed: dict[Node, None] = field(default_factory=dict)
    """In the order of the graph."""

    @property
    def values(self) -> tuple[Node, ...]:
        """All of it."""
        return (*self.inputs, *self.computed)

    @property
    def uses(self) -> tuple[tuple[Node, Node], ...]:
        """Who takes, and what: not who returns it, or writes it back to an input."""
        return tuple(
            (user, value)
            for value in self.values
            for user in value.users
            if user not in self.computed and user.op != "output" and not self._writes_back(user)
        )

    @property
    def is_written_back(self) -> bool:
        """Whether an input becomes what is computed of it, as a counter does."""
        return any(self._writes_back(user) for value in self.values for user in value.users)

    def _writes_back(self, node: Node) -> bool:
        return (
            node.target is aten.copy_.default
            and node.args[0] in self.inputs
            and node.args[1] in self.computed
        )

    def takes_in(self, other: Group) -> None:
        """Become both."""
        self.inputs.update(other.inputs)
        self.computed.update(other.computed)


def groups(graph: Graph, may_be_sent: Callable[[Node], bool]) -> list[Group]:
    """Return the inputs that the CPU computes with, those apart that never meet; `may_be_sent` tells of a node whether it is small."""
    of: dict[Node, Group] = {}
    constant: set[Node] = set()
    for node in graph.nodes:
        if fx_utils.is_mutating(node):
            break  # from here on an input may be another; what a graph changes in place, it changes at its end
        if not fx_utils.is_on_cpu(node) or not may_be_sent(node):
            continue
        if node.op == "placeholder":
            of[node] = Group({node: None})
        elif node.op == "get_attr" or makes_of_numbers(node):
            constant.add(node)
        elif node.target in ARITHMETIC:
            _join(node, of, constant)
    found = {id(group): group for group in of.values() if group.computed}
    return list(found.values())


def _join(node: Node, of: dict[Node, Group], constant: set[Node]) -> None:
    """Note what a node is computed of, if that is all known."""
    taken = node.all_input_nodes
    if not all(each in of or each in constant for each in taken):
        return
    joined = Group()
    for each in taken:
        if each in of:
            joined.takes_in(of[each])
    if not joined.inputs:
        constant.add(node)
        return
    joined.computed[node] = None
    for each in joined.values:
        of[each] = joined


def after_first_write(graph: Graph) -> frozenset[Node]:
    """Return the first node that writes in place, and all after it."""
    return frozenset(itertools.dropwhile(lambda node: not fx_utils.is_mutating(node), graph.nodes))


def is_backward(graph: Graph) -> bool:
    """Whether a graph is a backward: what its forward has saved on the CPU may be given to it on the GPU."""
    return any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


@dataclass(frozen=True, slots=True)
class Batch:
    """Values of one type, one after the other in a tensor of one dimension."""

    together: Node
    values: tuple[Node, ...]

    def parts(self, graph: Graph, there: Node) -> Iterator[tuple[Node, Node]]:
        """Yield each value, and what it is where the tensor was sent."""
        end = 0
        for each in self.values:
            value = fx_utils.value(each)
            yield each, fx_utils.part(graph, there, end, value)
            end += value.numel()


def hoist(graph: Graph, group: Group) -> dict[Node, Node]:
    """Compute at the place where nodes are being inserted what a group computes; return for each value what now gives it.

    Constants are made once more for it: what else takes them may have Inductor move them to the GPU.
    """
    copies: dict[Node, Node] = {}
    for each in needed(group.computed):
        copy = each if each.op == "placeholder" else graph.node_copy(each, lambda taken: copies[taken])
        copies[each] = copy if each.all_input_nodes else _kept_here(graph, copy)
    return {each: copies[each] for each in group.computed}


def needed(values: Iterable[Node]) -> Iterable[Node]:
    """Return all that values are computed of, and these, each after what it takes."""
    found: dict[Node, None] = {}
    waiting = list(reversed(list(values)))
    while waiting:
        each = waiting[-1]
        missing = [taken for taken in each.all_input_nodes if taken not in found]
        waiting += missing
        if not missing:
            found.setdefault(waiting.pop())
    return found


def makes_of_numbers(node: Node) -> bool:
    """Whether a node makes a tensor of numbers alone."""
    return node.target in _MAKERS and not node.all_input_nodes


def _kept_here(graph: Graph, value: Node) -> Node:
    kept = graph.call_function(HERE, (value,))
    kept.meta["val"] = fx_utils.value(value).new_empty(fx_utils.value(value).size())
    return kept


def batches(graph: Graph, values: Iterable[Node]) -> list[Batch]:
    """Put values together, one batch for each type, at the place where nodes are being inserted."""
    by_type: dict[torch.dtype, list[Node]] = {}
    for each in values:
        by_type.setdefault(fx_utils.value(each).dtype, []).append(each)
    return [Batch(_together(graph, each), tuple(each)) for each in by_type.values()]


def _together(graph: Graph, values: list[Node]) -> Node:
    flat = []
    for each in values:
        flat.append(graph.call_function(aten.view.default, (each, [math.prod(fx_utils.value(each).size())])))
        flat[-1].meta["val"] = fx_utils.value(each).view(-1)
    if len(flat) == 1:
        return flat[0]
    together = graph.call_function(aten.cat.default, (flat,))
    together.meta["val"] = flat[0].meta["val"].new_empty(sum(each.meta["val"].numel() for each in flat))
    return together


_library = torch.library.Library("pygraphd", "FRAGMENT")
# Inductor moves 0-d inputs and constants to the GPU, and of 2.11 does not see where they go. It goes past no operator that is not
# PyTorch's. No such operator is in what it compiles: it is lowered to a copy, which becomes part of what reads it.
_library.define("here(Tensor value) -> Tensor")
_library.impl("here", torch.clone, "CPU")
torch.library.register_fake("pygraphd::here", lambda value: value.new_empty(value.size()), lib=_library)
HERE: Any = torch.ops.pygraphd.here.default


def register() -> None:
    """Tell Inductor of the operator."""
    torch_private.lower_as(HERE, aten.clone.default)
