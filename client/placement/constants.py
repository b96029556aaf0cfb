"""Places constants on the GPU: CPU values that are known at compilation go there once, instead of at every call.

A constant is a literal tensor of the program (`torch.tensor([0, 2])`) or is computed from constants: here, on the CPU, with the bits of a
program that is not compiled. Copies to the GPU and indices into a GPU tensor then read the GPU's copy; all other uses keep the CPU value. A
value that follows from sizes alone (`torch.arange(n)`) is a constant where Inductor does not move it: it does in modes with CUDA graphs,
and in others for indices.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils
from pygraphd.client.placement.fx_utils import A_MASK, RUN_TIME_SIZE, PassResult

MAX_CONSTANT_BYTES = 16 << 20
"""The largest constant that is kept on the GPU, in bytes."""
MAX_GRAPH_BYTES = 64 << 20
"""Bound of all constants and intermediate values of one graph, in bytes: they are held until the pass ends."""

INPUT = "it is computed from an input of the graph"
TOO_LARGE = "it is larger than 16 MiB"
TOO_MANY = "the constants of this graph take more than 64 MiB"
RANDOM = "it is random, or not initialised"
NOT_PLAIN = "it is no plain tensor on the CPU"
NOT_COMPUTED = "it could not be computed when the graph was compiled"
NOT_PURE = "it is computed by an operator that may have side effects"
NO_CONSTANT = "it follows from sizes alone, which Inductor places itself"
USED_HERE = "the CPU computes with it further, and would compute other bits"

_COPIES = frozenset({fx_utils.FRESH, torch.ops.aten.clone.default})

ToDevice = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""A function that returns a copy of a tensor on a device."""


def place_constants(graph: Graph, to_device: ToDevice) -> PassResult:
    """Replace the GPU's uses of constants in a graph by uses of copies that `to_device` makes on the GPU."""
    values = _CompileTimeValues(graph)
    # All uses are found before one is changed: `_uses` walks the graph.
    changes: list[tuple[Node, Node, torch.Tensor]] = []
    left: list[str] = []
    for user, value in _uses(graph):
        found = values.value(value)
        reason = found if isinstance(found, str) else values.why_not(user, value) or _why_not(user, found)
        if isinstance(found, torch.Tensor) and reason is None:
            changes.append((user, value, found))
        elif reason != NO_CONSTANT and value.op != "placeholder":  # `inputs.py` reports those
            left.append(fx_utils.skip_message(user, str(reason)))
    _change(graph, changes, to_device)
    return PassResult(len(changes), tuple(left))


def scalar_messages(graph: Graph, others: Container[Node]) -> tuple[str, ...]:
    """Return the messages for scalars that the CPU computes at each call for GPU tensors, and that no pass moves.

    `others` are the nodes whose scalars another pass has handled.
    """
    reasons: dict[Node, str | None] = {}
    for node in graph.nodes:
        reasons[node] = _why_varies(node, reasons)
    found = ((user, reasons[value]) for user, value in _scalars(graph) if user not in others)
    return tuple(fx_utils.skip_message(user, reason) for user, reason in found if reason is not None)


def _why_varies(node: Node, reasons: Mapping[Node, str | None]) -> str | None:
    """Return why a value may differ from call to call; None if it follows from constants and sizes."""
    if node.op == "placeholder":
        return INPUT if isinstance(node.meta.get("val"), torch.Tensor) else None
    if (called := torch_private.operator_of(node)) is not None:
        if called.namespace not in {"aten", "prims"}:
            return NOT_PURE
        if torch.Tag.nondeterministic_seeded in called.tags:
            return RANDOM
    return next(filter(None, map(reasons.get, node.all_input_nodes)), None)


def _scalars(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield each node on the GPU with each scalar that it takes from a CPU operator."""
    for node in graph.nodes:
        if fx_utils.is_pointwise(node) and fx_utils.is_on_gpu(node):
            for value in node.all_input_nodes:
                if value.op != "placeholder" and fx_utils.is_on_cpu(value):
                    yield node, value


def skip_all_uses(graph: Graph, reason: str) -> tuple[str, ...]:
    """Return the messages for a graph that is not changed, for `reason`."""
    return tuple(
        fx_utils.skip_message(user, reason) for user, value in _uses(graph) if value.op != "placeholder"
    )


def _uses(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield each copy to a GPU, and each GPU tensor that is indexed, with the CPU value that it takes."""
    for node in graph.nodes:
        device = fx_utils.device(node)
        if device is None or not fx_utils.is_gpu(device):
            continue
        taken: Any = ()
        if node.target is fx_utils.COPY:
            taken = node.args[:1]
        elif node.target in fx_utils.INDEXING:
            taken = node.args[1]
        for value in dict.fromkeys(taken):
            if isinstance(value, Node) and fx_utils.is_on_cpu(value):
                yield node, value


def _why_not(user: Node, value: torch.Tensor) -> str | None:
    if user.target in fx_utils.INDEXING:
        return None if value.dtype in fx_utils.INDEX_TYPES else A_MASK
    return None if fx_utils.has_same_layout(fx_utils.fake(user), value) else NOT_PLAIN


class _CompileTimeValues:
    """The values of those CPU nodes of a graph that are the same at every call, computed on demand."""

    def __init__(self, graph: Graph) -> None:
        self._module = graph.owning_module
        self._found: dict[Node, torch.Tensor | str] = {}
        self._constants: set[Node] = set()
        """The nodes that are literal tensors, or are computed from one."""
        self._inexact: set[Node] = set()
        """The nodes that are computed by way of floating-point numbers, as an index that is a rounded logarithm."""
        self._bytes = 0

    def value(self, node: Node) -> torch.Tensor | str:
        """Return a node's value, or the reason why it is not known at compilation."""
        # Not by recursion: a chain of nodes may be longer than Python's stack is deep.
        waiting = [node]
        while waiting:
            each = waiting[-1]
            missing = [one for one in each.all_input_nodes if one not in self._found]
            if each in self._found or not missing or each.op != "call_function" or _why_not_computable(each):
                waiting.pop()
                self._found.setdefault(each, self._find(each))
            else:
                waiting += missing
        return self._found[node]

    def why_not(self, user: Node, node: Node) -> str | None:
        """Return why a use of a known value must not read the GPU's copy; None if it may."""
        if node not in self._constants and (
            torch_private.cudagraphs_asked() or user.target is not fx_utils.COPY
        ):
            return NO_CONSTANT
        # Compiled code for the CPU may round otherwise than the operators do here. Its value and the GPU's
        # copy would then differ in their last bits.
        goes_on = any(user.op == "output" or fx_utils.is_on_cpu(user) for user in node.users)
        if (goes_on and node in self._inexact) or any(map(self._reaches_program, self._inexact_before(node))):
            return USED_HERE
        return None

    def _inexact_before(self, node: Node) -> set[Node]:
        found: set[Node] = set()
        waiting = [*node.all_input_nodes]
        while waiting:
            each = waiting.pop()
            if each in self._inexact and each not in found:
                found.add(each)
                waiting += each.all_input_nodes
        return found

    def _reaches_program(self, node: Node) -> bool:
        """Return whether the program gets a value on the CPU, by itself or in another one that the CPU computes at each call."""
        seen, waiting = set[Node](), [node]
        while waiting:
            for user in waiting.pop().users:
                if user.op == "output":
                    return True
                if user in seen or not fx_utils.is_on_cpu(user):
                    continue
                if isinstance(self.value(user), str):
                    return True
                seen.add(user)
                waiting.append(user)
        return False

    def _find(self, node: Node) -> torch.Tensor | str:
        if node.op == "placeholder":
            return INPUT
        if node.op == "get_attr":
            self._constants.add(node)
            return self._constant(node)
        if not self._constants.isdisjoint(node.all_input_nodes):
            self._constants.add(node)
        if not self._inexact.isdisjoint(node.all_input_nodes) or _rounds(node):
            self._inexact.add(node)
        reason = _why_not_computable(node)
        reasons = [self._found[each] for each in node.all_input_nodes if each in self._found]
        reason = reason or next((each for each in reasons if isinstance(each, str)), None)
        return reason if reason is not None else self._computed(node)

    def _constant(self, node: Node) -> torch.Tensor | str:
        value: Any = operator.attrgetter(str(node.target))(self._module)
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NOT_PLAIN
        # A literal that the graph writes to has another value at the next call.
        if value.layout is not torch.strided or any(fx_utils.is_mutating(user) for user in node.users):
            return NOT_PLAIN
        return TOO_LARGE if value.nbytes > MAX_CONSTANT_BYTES else value

    def _computed(self, node: Node) -> torch.Tensor | str:
        # Before it is computed, since the bound is for the memory of intermediate values, too.
        self._bytes += fx_utils.fake(node).nbytes
        if self._bytes > MAX_GRAPH_BYTES:
            return TOO_MANY
        values = {each: self._found[each] for each in node.all_input_nodes}
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: values[each])
        compute: Any = node.target
        try:
            # Inductor compiles under a mode of fake tensors. The program may be in inference mode, and train
            # with the same code later.
            with torch_private.without_modes(), torch.inference_mode(False), torch.no_grad():
                result = compute(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the graph stays as it is
            return NOT_COMPUTED
        return result if type(result) is torch.Tensor else NOT_PLAIN


def _rounds(node: Node) -> bool:
    """Return whether a node computes floating-point numbers, which compiled code may round otherwise."""
    value = node.meta.get("val")
    is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return is_float and node.op == "call_function" and node.target not in _COPIES


def _why_not_computable(node: Node) -> str | None:
    """Return why a node cannot be computed at compilation, whatever its inputs are; None if it can be."""
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
    if not fx_utils.has_static_layout(node):
        return RUN_TIME_SIZE
    return TOO_LARGE if value.nbytes > MAX_CONSTANT_BYTES else None


def _change(graph: Graph, changes: list[tuple[Node, Node, torch.Tensor]], to_device: ToDevice) -> None:
    """Change the uses one by one: an exception in between leaves a graph that computes the same."""
    constants: dict[tuple[Node, torch.device], Node] = {}
    # One iterator for all: asking for each name from 0 on takes seconds with thousands of constants.
    names = (f"_pygraph_known_{number}" for number in itertools.count())
    free = (name for name in names if not hasattr(graph.owning_module, name))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for user, value, known in changes:
        key = value, fx_utils.fake(user).device
        if key not in constants:
            with graph.inserting_before(first):
                first = constants[key] = _add_constant(graph, next(free), *key, to_device(known, key[1]))
        fx_utils.replace_use(graph, user, value, constants[key])
    fx_utils.remove_unused(graph, [value for _, value, _ in changes])


def _add_constant(graph: Graph, name: str, value: Node, device: torch.device, known: torch.Tensor) -> Node:
    """Add the GPU's copy `known` of a node's value to the graph's module, and a node for it at the insertion point."""
    module: Any = graph.owning_module
    module.register_buffer(name, known, persistent=False)
    node = graph.get_attr(name)
    node.meta["val"] = torch_private.fake_on(device, fx_utils.fake(value))
    return node
