"""What the GPU computes as the CPU would: masks from lengths, positions from an offset, and all of `bit_exact.py` that the GPU takes.

It computes that within what is captured, and only the inputs are sent. Left on the CPU it is a kernel of several threads at every
call, and a copy for each result. What the CPU alone computes right is left to `hoist.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils, hoist
from pygraphd.client.placement.bit_exact import exact_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch
    from torch.fx import Graph

    from pygraphd.client.placement.bit_exact import Exact

MAX_BYTES = 64 << 20
"""A larger value is left where it is: on the way to it the GPU may need memory that the CPU's had."""
MAX_INPUT_BYTES = 16 << 10
"""Of all inputs that are sent for this."""
_ROUNDS = 8
"""So often uses are left because others are; then all."""


@dataclass(frozen=True, slots=True)
class _Use:
    """Who on the GPU takes what the CPU computes."""

    taker: Node
    value: Node

    @property
    def device(self) -> torch.device:
        return fx_utils.value(self.taker).device


def compute_there(
    graph: Graph, may_be_sent: Callable[[Node], bool], takes: Callable[[Node, Node], bool]
) -> None:
    """Have the GPU compute all of this kind that it takes, from copies of the inputs.

    `may_be_sent` tells of a node whether its value is small, and `takes` whether one may take a value from the GPU instead.
    """
    if hoist.is_backward(graph):
        return  # its forward may have saved on the GPU what this was compiled for on the CPU
    exact, late = exact_values(graph, may_be_sent), hoist.after_first_write(graph)
    found = [use for use in _uses(exact) if use.taker not in late]
    uses = [use for use in found if _is_worth_it(use) and takes(use.taker, use.value)]
    uses = _of_inputs_that_are_sent(uses, exact, may_be_sent)
    for device in dict.fromkeys(use.device for use in uses):
        _change(graph, device, [use for use in uses if use.device == device])
    fx_utils.remove_unused(graph, [use.value for use in uses])


def _uses(exact: Mapping[Node, Exact]) -> Iterator[_Use]:
    """Yield who on a GPU takes what is computed of an input."""
    for value, each in exact.items():
        if each.inputs and value.op != "placeholder":
            for taker in value.users:
                if taker not in exact and fx_utils.lies_elsewhere(taker):
                    yield _Use(taker, value)


def _is_worth_it(use: _Use) -> bool:
    """Whether a value has dimensions, and may be made elsewhere: PyTorch passes numbers to kernels without the host waiting."""
    value = fx_utils.value(use.value)
    return bool(value.dim() > 0 and value.is_contiguous() and value.nbytes <= MAX_BYTES)


def _of_inputs_that_are_sent(
    uses: list[_Use], exact: Mapping[Node, Exact], may_be_sent: Callable[[Node], bool]
) -> list[_Use]:
    """Return the uses whose inputs will all be sent: else each would be copied, with the host waiting, in place of the value."""
    uses = _within_bounds(uses, exact)
    for _ in range(_ROUNDS):
        gone = _unused_without(uses, exact)
        inputs = frozenset[Node]().union(*(exact[use.value].inputs for use in uses))
        sent = {each for each in inputs if _will_be_sent(each, gone, may_be_sent)}
        kept = [use for use in uses if exact[use.value].inputs <= sent]
        if len(kept) == len(uses):
            return kept
        uses = kept  # what is left for one may be what another's inputs are needed for
    return []


def _within_bounds(uses: Sequence[_Use], exact: Mapping[Node, Exact]) -> list[_Use]:
    """Return the first uses whose inputs are not too large together."""
    kept: list[_Use] = []
    inputs: set[Node] = set()
    size = 0
    for use in uses:
        more = exact[use.value].inputs - inputs
        added = sum(fx_utils.value(each).nbytes for each in more)
        if size + added <= MAX_INPUT_BYTES:
            kept.append(use)
            inputs |= more
            size += added
    return kept


def _unused_without(uses: Sequence[_Use], exact: Mapping[Node, Exact]) -> set[Node]:
    """Return what nobody takes any more once these uses have gone."""
    goes = {(use.taker, use.value) for use in uses}
    gone: set[Node] = set()
    for value in reversed(list(exact)):
        if value.op != "placeholder" and all(user in gone or (user, value) in goes for user in value.users):
            gone.add(value)
    return gone


def _will_be_sent(value: Node, gone: Collection[Node], may_be_sent: Callable[[Node], bool]) -> bool:
    """Whether the CPU does nothing else with an input but what `hoist.py` deals with.

    Nor writes to it: a counter is another at every call, and what is computed of it may be the same at most.
    """
    waiting, seen = [value], {value}
    while waiting:
        each = waiting.pop()
        for user in each.users:
            if user in gone or user in seen or user.op == "output" or fx_utils.lies_elsewhere(user):
                continue
            if user.target not in hoist.ARITHMETIC or not may_be_sent(user):
                return False
            seen.add(user)
            waiting.append(user)
    return True


def _change(graph: Graph, device: torch.device, uses: Sequence[_Use]) -> None:
    """Change one use after the other: whatever ends this early leaves a graph that computes the same."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    there: dict[Node, Node] = {}
    with graph.inserting_before(first):
        for node in hoist.needed(use.value for use in uses):
            there[node] = (
                _copied(graph, node, device)
                if node.op == "placeholder"
                else _made(graph, node, device, there)
            )
    for use in uses:
        fx_utils.take(graph, use.taker, use.value, there[use.value])


def _copied(graph: Graph, value: Node, device: torch.device) -> Node:
    copy = graph.call_function(fx_utils.COPY, (value, device))
    copy.meta = {"val": torch_private.fake_on(device, fx_utils.value(value))}
    # Whoever is told of the copy is told of the line of the user's that made it necessary.
    if trace := next((user.meta["stack_trace"] for user in value.users if "stack_trace" in user.meta), None):
        copy.meta["stack_trace"] = trace
    return copy


def _made(graph: Graph, node: Node, device: torch.device, there: dict[Node, Node]) -> Node:
    made = graph.node_copy(node, lambda taken: there[taken])
    made.meta["val"] = torch_private.fake_on(device, fx_utils.value(node))
    if not node.all_input_nodes:
        made.kwargs = {**made.kwargs, "device": device}
    return made
