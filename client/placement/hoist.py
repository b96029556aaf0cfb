"""Moves CPU arithmetic on a graph's small inputs to the beginning of the graph: it stays on the CPU, and only results are sent.

Examples are a bias correction from a step counter, a table of distances from a position, or a mask from lengths. Left in place, PyTorch copies each result
while the host waits, or computes on the GPU a value that the CPU then waits for (a counter that is changed in place). Results of one dtype
are sent as one value, since each copy costs host time. `inputs.py` decides which uses may read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
        *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default),
        *(aten.logical_and.default, aten.logical_or.default),
        *(aten.logical_xor.default, aten.logical_not.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.view.default),
        *(aten.slice.Tensor, aten.select.int),
        *(prims.convert_element_type.default, aten.clone.default, fx_utils.FRESH),
    }
)
"""Operators that may be moved to the beginning of a graph. All are pure and cheap on small tensors."""
_MAKERS = frozenset({aten.full.default, aten.scalar_tensor.default, prims.iota.default})
"""Operators that make a tensor from numbers alone."""


@dataclass(slots=True, eq=False)
class Group:
    """A CPU input, or several that meet in a computation, and the CPU values that are computed from them."""

    inputs: dict[Node, None] = field(default_factory=dict)
    computed: dict[Node, None] = field(default_factory=dict)
    """The values computed from the inputs, in the order of the graph."""

    @property
    def values(self) -> tuple[Node, ...]:
        """The inputs, followed by the computed values."""
        return (*self.inputs, *self.computed)

    @property
    def uses(self) -> tuple[tuple[Node, Node], ...]:
        """Pairs of user and value, without the graph's output and without writes back to an input."""
        return tuple(
            (user, value)
            for value in self.values
            for user in value.users
            if user not in self.computed and user.op != "output" and not self._writes_back(user)
        )

    @property
    def gpu_uses(self) -> tuple[tuple[Node, Node], ...]:
        """Those uses whose user is on a GPU."""
        return tuple(use for use in self.uses if fx_utils.is_on_gpu(use[0]))

    @property
    def needs_cpu(self) -> bool:
        """Whether the CPU does more with the inputs than casts, which the GPU makes as well."""
        return self.is_written_back or any(
            is_returned(each) or not _is_lossless_cast(each) for each in self.computed
        )

    @property
    def sent(self) -> tuple[Node, ...]:
        """The values that are to be sent."""
        if not self.needs_cpu:
            return tuple(self.inputs)
        return tuple(dict.fromkeys(value for _, value in self.uses))

    @property
    def is_written_back(self) -> bool:
        """Whether a computed value is written back to an input, as for a counter."""
        return any(self._writes_back(user) for value in self.values for user in value.users)

    def _writes_back(self, node: Node) -> bool:
        return (
            node.target is aten.copy_.default
            and node.args[0] in self.inputs
            and node.args[1] in self.computed
        )

    def merge(self, other: Group) -> None:
        """Add the inputs and values of another group."""
        self.inputs.update(other.inputs)
        self.computed.update(other.computed)


def find_groups(graph: Graph, may_be_moved: Callable[[Node], bool]) -> list[Group]:
    """Return the groups of a graph; inputs that never meet are in different ones. `may_be_moved` says whether a value is small enough."""
    group_of: dict[Node, Group] = {}
    constant: set[Node] = set()
    alone: list[Group] = []
    for node in graph.nodes:
        if fx_utils.is_mutating(node):
            break  # an input may have changed from here on; functionalised graphs write at their end
        if not fx_utils.is_on_cpu(node):
            continue
        if not may_be_moved(node) and not _is_lossless_cast(node):
            # An input that is too large: a group of its own, so that its uses are reported with the reason.
            alone += [Group({node: None})] if node.op == "placeholder" else []
        elif node.op == "placeholder":
            group_of[node] = Group({node: None})
        elif node.op == "get_attr" or (node.target in _MAKERS and not node.all_input_nodes):
            constant.add(node)
        elif node.target in ARITHMETIC:
            _join(node, group_of, constant)
    return list(dict.fromkeys((*group_of.values(), *alone)))


def _join(node: Node, group_of: dict[Node, Group], constant: set[Node]) -> None:
    """Add a node to the joined groups of its inputs, if each input is in a group or constant."""
    taken = node.all_input_nodes
    if not all(each in group_of or each in constant for each in taken):
        return
    joined = Group()
    for each in taken:
        if each in group_of:
            joined.merge(group_of[each])
    if not joined.inputs:
        constant.add(node)
        return
    joined.computed[node] = None
    for each in joined.values:
        group_of[each] = joined


def is_returned(value: Node) -> bool:
    """Return whether a value is among the graph's outputs."""
    return any(user.op == "output" for user in value.users)


def _is_lossless_cast(node: Node) -> bool:
    """Return whether a CPU node is a cast to float32 or float64, which both devices round alike."""
    if node.target is not prims.convert_element_type.default or not fx_utils.is_on_cpu(node):
        return False
    before, after = node.args
    return after in {torch.float32, torch.float64} and not fx_utils.fake(before).dtype.is_complex


def is_backward(graph: Graph) -> bool:
    """Return whether a graph is a backward: it may receive on the GPU a value that its forward saved on the CPU."""
    # The name that AOTAutograd gives to gradients of outputs.
    return any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


@dataclass(frozen=True, slots=True)
class Batch:
    """Values of one dtype, concatenated in the 1-d tensor `packed`."""

    packed: Node
    values: tuple[Node, ...]

    def split(self, graph: Graph, there: Node) -> Iterator[tuple[Node, Node]]:
        """Yield each value with its part of `there`, which is `packed` on the GPU."""
        end = 0
        for each in self.values:
            value = fx_utils.fake(each)
            yield each, fx_utils.add_slice(graph, there, end, value)
            end += value.numel()


def hoist(graph: Graph, group: Group) -> dict[Node, Node]:
    """Copy the nodes of a group's computed values to the insertion point; return the copy of each value.

    Constants are copied, too: Inductor may move the originals to the GPU for the sake of other users.
    """
    copies: dict[Node, Node] = {}
    for each in _with_dependencies(group.computed):
        copy = each if each.op == "placeholder" else graph.node_copy(each, lambda taken: copies[taken])
        copies[each] = copy if each.all_input_nodes else pin_to_cpu(graph, copy)
    return {each: copies[each] for each in group.computed}


def _with_dependencies(values: Iterable[Node]) -> Iterable[Node]:
    """Return the values and all nodes that they depend on, in topological order."""
    # Not by recursion: a chain of nodes may be longer than Python's stack is deep.
    found: dict[Node, None] = {}
    waiting = list(reversed(list(values)))
    while waiting:
        each = waiting[-1]
        missing = [taken for taken in each.all_input_nodes if taken not in found]
        waiting += missing
        if not missing:
            found.setdefault(waiting.pop())
    return found


def pin_to_cpu(graph: Graph, value: Node) -> Node:
    """Add a copy of a CPU value, which Inductor's passes leave on the CPU."""
    kept = graph.call_function(HERE, (value,))
    kept.meta["val"] = fx_utils.fake(value).new_empty(fx_utils.fake(value).size())
    return kept


def concatenate(graph: Graph, values: Iterable[Node]) -> list[Batch]:
    """Add nodes at the insertion point that concatenate values, one batch for each dtype."""
    # Dtypes apart: beside a float64, `cat` would make a float64 of an int64.
    by_type: dict[torch.dtype, list[Node]] = {}
    for each in values:
        by_type.setdefault(fx_utils.fake(each).dtype, []).append(each)
    return [Batch(_concatenate(graph, each), tuple(each)) for each in by_type.values()]


def _concatenate(graph: Graph, values: list[Node]) -> Node:
    flat = []
    for each in values:
        flat.append(graph.call_function(aten.view.default, (each, [math.prod(fx_utils.fake(each).size())])))
        # A view is enough: values that are not contiguous are not moved.
        flat[-1].meta["val"] = fx_utils.fake(each).view(-1)
    if len(flat) == 1:
        return flat[0]
    packed = graph.call_function(aten.cat.default, (flat,))
    packed.meta["val"] = flat[0].meta["val"].new_empty(sum(each.meta["val"].numel() for each in flat))
    return packed


_library = torch.library.Library("pygraphd", "FRAGMENT")
# Inductor's pass for scalars moves 0-d inputs and constants to the GPU, in torch 2.11 also where the CPU reads them. It stops at operators that
# are not PyTorch's. This one is lowered to a copy, which is fused into its reader, so it costs nothing.
_library.define("here(Tensor value) -> Tensor")
_library.impl("here", torch.clone, "CPU")
torch.library.register_fake("pygraphd::here", lambda value: value.new_empty(value.size()), lib=_library)
HERE: Any = torch.ops.pygraphd.here.default


def register() -> None:
    """Register the lowering of `pygraphd::here` with Inductor."""
    torch_private.lower_as(HERE, aten.clone.default)
