"""CPU values that are known when a graph is compiled, put on the GPU then instead of at every call.

They are constants (`torch.tensor([0, 2])` in a forward) and what is computed from these. It is computed here, on the CPU, so its
bits are those of a program that is not compiled. Two kinds of use take it from the GPU: a copy to the GPU, and indices into a
tensor there. Every other use keeps the value that it has. What comes from sizes alone Inductor moves itself.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils
from pygraphd.client.placement.fx_utils import Moved

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

MAX_BYTES = 1 << 20
"""A larger value is not kept on the GPU for the sake of a copy."""
MAX_COMPUTED_BYTES = 64 << 20
"""Of one graph: what is computed on the way there is kept until the graph is done with."""

INPUT = "it is computed from an input of the graph"
TOO_LARGE = "it is larger than 1 MiB"
TOO_MANY = "what is known of this graph takes more than 64 MiB"
RUN_TIME_SIZE = "its size is known at run time only"
RANDOM = "it is random, or not initialised"
NOT_PLAIN = "it is no plain tensor on the CPU"
NOT_COMPUTED = "it could not be computed when the graph was compiled"
NOT_PURE = "it is computed by what may do more than compute"
NO_CONSTANT = "it comes from sizes alone, and Inductor moves what it can of these"
USED_HERE = "the CPU goes on with it, and would compute other bits"
A_MASK = "it is a mask, and how much that selects is known at run time only"

_COPIES = frozenset({fx_utils.FRESH, torch.ops.aten.clone.default})

Place = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""Puts a tensor on a device."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A CPU value that a node takes to the GPU, or that it indexes something there by."""

    taker: Node
    value: Node
    device: torch.device


def place_known_values(graph: Graph, place: Place) -> Moved:
    """Have a graph's uses of known values take them from the GPU, where `place` puts them."""
    known = _Known(graph)
    changes: list[tuple[_Use, torch.Tensor]] = []
    left: list[str] = []
    for use in _uses(graph):
        found = known.value(use.value)
        reason = found if isinstance(found, str) else known.why_not(use.value) or _why_not(use, found)
        if isinstance(found, torch.Tensor) and reason is None:
            changes.append((use, found))
        elif reason != NO_CONSTANT and use.value.op != "placeholder":  # of which `inputs.py` tells
            left.append(fx_utils.said(use.taker, str(reason)))
    _change(graph, changes, place)
    return Moved(len(changes), tuple(left))


def numbers_left(graph: Graph, others: Container[Node]) -> tuple[str, ...]:
    """Return what is to be said of numbers that the CPU makes anew at each call, for tensors on the GPU, and that no rule takes.

    `others` are nodes whose numbers another rule has dealt with.
    """
    reasons: dict[Node, str | None] = {}
    for node in graph.nodes:
        reasons[node] = _why_made_anew(node, reasons)
    found = ((taker, reasons[value]) for taker, value in _numbers(graph) if taker not in others)
    return tuple(fx_utils.said(taker, reason) for taker, reason in found if reason is not None)


def _why_made_anew(node: Node, reasons: Mapping[Node, str | None]) -> str | None:
    """Return why a value may be another one at each call; None of what follows from constants and sizes."""
    if node.op == "placeholder":
        return INPUT if isinstance(node.meta.get("val"), torch.Tensor) else None
    if (called := torch_private.operator_of(node)) is not None:
        if called.namespace not in {"aten", "prims"}:
            return NOT_PURE
        if torch.Tag.nondeterministic_seeded in called.tags:
            return RANDOM
    return next(filter(None, map(reasons.get, node.all_input_nodes)), None)


def _numbers(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield who on the GPU takes which number that the CPU makes."""
    for node in graph.nodes:
        if fx_utils.is_pointwise(node) and fx_utils.lies_elsewhere(node):
            for value in node.all_input_nodes:
                if value.op != "placeholder" and fx_utils.is_on_cpu(value):
                    yield node, value


def all_left(graph: Graph, reason: str) -> tuple[str, ...]:
    """Return what is to be said of a graph that is left as it is."""
    return tuple(fx_utils.said(use.taker, reason) for use in _uses(graph) if use.value.op != "placeholder")


def _uses(graph: Graph) -> Iterator[_Use]:
    for node in graph.nodes:
        device = fx_utils.device(node)
        if device is None or not fx_utils.is_elsewhere(device):
            continue
        if node.target is fx_utils.COPY:
            taken = [node.args[0]]
        elif node.target in fx_utils.INDEXING:
            taken = list(node.args[1])
        else:
            continue
        for value in dict.fromkeys(taken):
            if isinstance(value, Node) and fx_utils.is_on_cpu(value):
                yield _Use(node, value, device)


def _why_not(use: _Use, value: torch.Tensor) -> str | None:
    if use.taker.target in fx_utils.INDEXING:
        return None if value.dtype in fx_utils.INDEX_TYPES else A_MASK
    copied = use.taker.meta["val"]
    same = (copied.dtype, copied.size(), copied.stride()) == (value.dtype, value.size(), value.stride())
    return None if same else NOT_PLAIN


class _Known:
    """The values of a graph's CPU nodes that follow from nothing that changes between calls."""

    def __init__(self, graph: Graph) -> None:
        self._module = graph.owning_module
        self._found: dict[Node, torch.Tensor | str] = {}
        self._constants: set[Node] = set()
        """Those that are constants, or are computed from one."""
        self._bytes = 0

    def value(self, node: Node) -> torch.Tensor | str:
        """Return a node's value, or why it is not known."""
        # Not by recursion: a chain of nodes may be longer than Python's stack is deep.
        waiting = [node]
        while waiting:
            each = waiting[-1]
            missing = [one for one in each.all_input_nodes if one not in self._found]
            if each in self._found or not (missing and self._may_be_known(each)):
                waiting.pop()
                self._found.setdefault(each, self._find(each))
            else:
                waiting += missing
        return self._found[node]

    def why_not(self, node: Node) -> str | None:
        """Return why a known value is not to be taken from elsewhere."""
        if node not in self._constants:
            return NO_CONSTANT
        computed = node.op == "call_function" and node.target not in _COPIES
        goes_on = any(user.op == "output" or fx_utils.is_on_cpu(user) for user in node.users)
        inexact = isinstance(self._found[node], torch.Tensor) and node.meta["val"].is_floating_point()
        return USED_HERE if computed and goes_on and inexact else None

    def _may_be_known(self, node: Node) -> bool:
        return node.op == "call_function" and _why_not_computed(node) is None

    def _find(self, node: Node) -> torch.Tensor | str:
        if node.op == "placeholder":
            return INPUT
        if node.op == "get_attr":
            self._constants.add(node)
            return self._constant(node)
        if not self._constants.isdisjoint(node.all_input_nodes):
            self._constants.add(node)
        reason = _why_not_computed(node)
        reasons = [self._found[each] for each in node.all_input_nodes if each in self._found]
        reason = reason or next((each for each in reasons if isinstance(each, str)), None)
        return reason if reason is not None else self._computed(node)

    def _constant(self, node: Node) -> torch.Tensor | str:
        value: Any = operator.attrgetter(str(node.target))(self._module)
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NOT_PLAIN
        if value.layout is not torch.strided or any(fx_utils.is_mutating(user) for user in node.users):
            return NOT_PLAIN
        return TOO_LARGE if value.nbytes > MAX_BYTES else value

    def _computed(self, node: Node) -> torch.Tensor | str:
        self._bytes += node.meta["val"].numel() * node.meta["val"].itemsize
        if self._bytes > MAX_COMPUTED_BYTES:
            return TOO_MANY
        values = {each: self._found[each] for each in node.all_input_nodes}
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: values[each])
        compute: Any = node.target
        try:
            with torch_private.without_modes(), torch.inference_mode(False), torch.no_grad():
                result = compute(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, the graph is left as it was
            return NOT_COMPUTED
        return result if type(result) is torch.Tensor else NOT_PLAIN


def _why_not_computed(node: Node) -> str | None:
    """Return why a node that computes something cannot be computed now, whatever it takes."""
    called, value = torch_private.operator_of(node), node.meta.get("val")
    if called is None or called.namespace not in {"aten", "prims"}:
        return NOT_PURE
    if fx_utils.is_mutating(node):
        return NOT_PURE
    if torch.Tag.nondeterministic_seeded in called.tags or any(
        name in called.name() for name in ("empty", "resize", "from_file")
    ):
        return RANDOM
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return NOT_PLAIN
    if not all(type(each) is int for each in (*value.size(), *value.stride())):
        return RUN_TIME_SIZE
    return TOO_LARGE if value.numel() * value.itemsize > MAX_BYTES else None


def _change(graph: Graph, changes: list[tuple[_Use, torch.Tensor]], place: Place) -> None:
    """Change one use after the other: whatever ends this early leaves a graph that computes the same."""
    constants: dict[tuple[Node, torch.device], Node] = {}
    names = _free_names(graph.owning_module)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for use, value in changes:
        constant = constants.get((use.value, use.device))
        if constant is None:
            with graph.inserting_before(first):
                first = constant = _add_constant(graph, next(names), use, place(value, use.device))
            constants[use.value, use.device] = constant
        if use.taker.target is fx_utils.COPY:
            fx_utils.replace_by_copy(graph, use.taker, constant)
        else:
            fx_utils.replace_index(use.taker, use.value, constant)
    fx_utils.remove_unused(graph, [use.value for use, _ in changes])


def _free_names(module: object) -> Iterator[str]:
    names = (f"_pygraph_known_{number}" for number in itertools.count())
    return (name for name in names if not hasattr(module, name))


def _add_constant(graph: Graph, name: str, use: _Use, value: torch.Tensor) -> Node:
    """Add a constant at the place where nodes are being inserted."""
    module: Any = graph.owning_module
    module.register_buffer(name, value, persistent=False)
    node = graph.get_attr(name)
    node.meta["val"] = torch_private.fake_on(use.device, use.value.meta["val"])
    return node
