"""Recomputes CPU values on the GPU, inside the captured partition: masks from lengths, or positions from an offset.

Only values with the same bits on both devices are recomputed (`bit_exact.py`), and only their inputs are sent. Left on the CPU, each
costs a multi-threaded CPU kernel and a copy at every call. `hoist.py` handles values that the CPU alone computes with these bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils, hoist
from pygraphd.client.placement.bit_exact import bit_exact_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch
    from torch.fx import Graph

    from pygraphd.client.placement.bit_exact import BitExact

MAX_BYTES = 64 << 20
"""The largest value that is recomputed, in bytes: its intermediate values take GPU memory, too."""
MAX_INPUT_BYTES = 16 << 10
"""Bound of all inputs that are sent for one graph's recomputed values, in bytes."""
_ROUNDS = 8
"""Rounds of dropping uses whose inputs cannot be sent; after the last, all uses are dropped."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a CPU value by a node on the GPU."""

    user: Node
    value: Node

    @property
    def device(self) -> torch.device:
        return fx_utils.fake(self.user).device


def recompute(graph: Graph, may_be_sent: Callable[[Node], bool], takes: Callable[[Node, Node], bool]) -> None:
    """Recompute on the GPU those bit-exact CPU values of a graph that the GPU uses, from copies of their inputs.

    `may_be_sent(node)` says whether a value is small enough to send, `takes(user, value)` whether a user accepts the GPU's value.
    """
    if hoist.is_backward(graph):
        return  # its forward may have saved on the GPU a value that this graph expects on the CPU
    values, written = bit_exact_values(graph, may_be_sent), hoist.from_first_mutation(graph)
    found = [use for use in _uses(values) if use.user not in written]
    uses = [use for use in found if _is_worth_it(use) and takes(use.user, use.value)]
    uses = _with_sendable_inputs(uses, values, may_be_sent)
    for device in dict.fromkeys(use.device for use in uses):
        _change(graph, device, [use for use in uses if use.device == device])
    fx_utils.remove_unused(graph, [use.value for use in uses])


def _uses(values: Mapping[Node, BitExact]) -> Iterator[_Use]:
    """Yield the uses on a GPU of values that are computed from an input."""
    for value, each in values.items():
        if each.inputs and value.op != "placeholder":
            for user in value.users:
                if user not in values and fx_utils.is_on_gpu(user):
                    yield _Use(user, value)


def _is_worth_it(use: _Use) -> bool:
    """Return whether a value is contiguous, small and no scalar: PyTorch passes scalars to kernels without a wait."""
    value = fx_utils.fake(use.value)
    return bool(value.dim() > 0 and value.is_contiguous() and value.nbytes <= MAX_BYTES)


def _with_sendable_inputs(
    uses: list[_Use], values: Mapping[Node, BitExact], may_be_sent: Callable[[Node], bool]
) -> list[_Use]:
    """Return the uses whose inputs can all be sent; for others the host would wait for a copy of each input."""
    uses = _within_bounds(uses, values)
    for _ in range(_ROUNDS):
        unused = _unused_after(uses, values)
        inputs = frozenset[Node]().union(*(values[use.value].inputs for use in uses))
        sent = {each for each in inputs if _is_sendable(each, unused, may_be_sent)}
        kept = [use for use in uses if values[use.value].inputs <= sent]
        if len(kept) == len(uses):
            return kept
        uses = kept  # a dropped use may need an input that another use wanted to send
    return []


def _within_bounds(uses: Sequence[_Use], values: Mapping[Node, BitExact]) -> list[_Use]:
    """Return those uses, in order, whose inputs fit into `MAX_INPUT_BYTES` together."""
    kept: list[_Use] = []
    inputs: set[Node] = set()
    size = 0
    for use in uses:
        more = values[use.value].inputs - inputs
        added = sum(fx_utils.fake(each).nbytes for each in more)
        if size + added <= MAX_INPUT_BYTES:
            kept.append(use)
            inputs |= more
            size += added
    return kept


def _unused_after(uses: Sequence[_Use], values: Mapping[Node, BitExact]) -> set[Node]:
    """Return the values that have no users left without these uses."""
    goes = {(use.user, use.value) for use in uses}
    unused: set[Node] = set()
    for value in reversed(list(values)):
        if value.op != "placeholder" and all(user in unused or (user, value) in goes for user in value.users):
            unused.add(value)
    return unused


def _is_sendable(value: Node, unused: Collection[Node], may_be_sent: Callable[[Node], bool]) -> bool:
    """Return whether the CPU uses an input only in ways that `hoist.py` can move, and does not write to it.

    A counter that is written back differs at every call, though a value computed from it may not.
    """
    waiting, seen = [value], {value}
    while waiting:
        each = waiting.pop()
        for user in each.users:
            if user in unused or user in seen or user.op == "output" or fx_utils.is_on_gpu(user):
                continue
            if user.target not in hoist.ARITHMETIC or not may_be_sent(user):
                return False
            seen.add(user)
            waiting.append(user)
    return True


def _change(graph: Graph, device: torch.device, uses: Sequence[_Use]) -> None:
    """Change the uses one by one: an exception in between leaves a graph that computes the same."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    on_gpu: dict[Node, Node] = {}
    with graph.inserting_before(first):
        for node in hoist.with_dependencies(use.value for use in uses):
            on_gpu[node] = (
                _copied(graph, node, device)
                if node.op == "placeholder"
                else _made(graph, node, device, on_gpu)
            )
    for use in uses:
        fx_utils.replace_use(graph, use.user, use.value, on_gpu[use.value])


def _copied(graph: Graph, value: Node, device: torch.device) -> Node:
    copy = graph.call_function(fx_utils.COPY, (value, device))
    copy.meta = {"val": torch_private.fake_on(device, fx_utils.fake(value))}
    # Messages about the copy name the user's line that made it necessary.
    if trace := next((user.meta["stack_trace"] for user in value.users if "stack_trace" in user.meta), None):
        copy.meta["stack_trace"] = trace
    return copy


def _made(graph: Graph, node: Node, device: torch.device, on_gpu: dict[Node, Node]) -> Node:
    made = graph.node_copy(node, lambda taken: on_gpu[taken])
    made.meta["val"] = torch_private.fake_on(device, fx_utils.fake(node))
    if not node.all_input_nodes:
        made.kwargs = {**made.kwargs, "device": device}
    return made
