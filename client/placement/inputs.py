"""Small CPU values that are inputs of a graph (a temperature, a learning rate, a buffer left on the CPU), read on the GPU by it.

They go there before what is captured runs, when they have changed; see `upload.py`. PyTorch copies them at every call, and
leaves a graph uncaptured from the first of them to the last. What the CPU does with an input, and an input that is returned, stays
as it is. Which uses are changed: copies to the GPU, indices into a tensor there, and scalars that meet tensors there. The same
uses of what the CPU computes of inputs are changed, too: the GPU computes it where that is the same (`gpu_recompute.py`), or the CPU sends what
it has computed (`hoist.py`).
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils, gpu_recompute, hoist
from pygraphd.client.placement.fx_utils import Moved
from pygraphd.client.placement.upload import SENT, kinds_text, pieces

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from torch.fx import Graph

    from pygraphd.client.placement.hoist import Group
    from pygraphd.client.placement.upload import Piece

MAX_BYTES = 16 << 10
"""Up to here, reading a value at every call costs the host less than 1 us more than reading a number."""
MAX_BYTES_OF_GRAPH = 64 << 10
FEW_NUMBERS = 8
"""Fewer numbers of a graph than these are left to PyTorch. Sending two takes 63 us more than its copies (H200); that eight take less is an estimate."""

TOO_LARGE = "it is larger than 16 KiB"
TOO_MANY = "the small inputs of this graph take more than 64 KiB"
RUN_TIME_SIZE = "its size is known at run time only"
NOT_PLAIN = "it is no plain, contiguous tensor"
CHANGED = "the graph changes it in place"
USED_HERE = "the CPU computes with it, too, in a way that is left where it is"
SAVED = "the CPU computes with it in a backward, whose forward may have saved it on the GPU"
A_MASK = "it is a mask, and how much that selects is known at run time only"
OTHER_USE = "it is taken in a way that may tell where it lies"
SEVERAL_GPUS = "more than one GPU takes it"
ONLY_A_FEW = "it is one of a few numbers, which PyTorch sends as quickly"


@dataclass(frozen=True, slots=True)
class _Input:
    """An input on the CPU, or what is the same number in another type, and who takes either."""

    value: Node
    same: tuple[Node, ...]
    uses: tuple[tuple[Node, Node], ...]
    """Who takes, and what: the input, or one that is the same."""

    @property
    def on_gpu(self) -> list[Node]:
        """The takers that have it come to the GPU."""
        return [taker for taker, _ in self.uses if fx_utils.lies_elsewhere(taker)]

    @property
    def bytes(self) -> int:
        value = self.value.meta["val"]
        return int(value.numel() * value.itemsize)


def place_inputs(graph: Graph) -> Moved:
    """Have a graph's uses of small CPU inputs take them from the GPU, where they are sent at the beginning of a call."""
    gpu_recompute.compute_there(graph, _may_be_sent, lambda taker, value: _why_not_use(taker, value) is None)
    plan = _plan(graph)
    dealt_with = frozenset(plan.told_of.union(plan.takers))
    lines: dict[str, tuple[str, ...]] = {}
    for device in dict.fromkeys((*plan.inputs, *plan.groups)):
        lines |= _change(graph, device, plan.inputs.get(device, []), plan.groups.get(device, []))
    return Moved(plan.uses, tuple(plan.left), dealt_with, lines)


def leave_all(graph: Graph, reason: str) -> Moved:
    """Return what is to be said of a graph that is left as it is."""
    takers = [taker for each in _inputs(graph) for taker in each.on_gpu]
    return Moved(0, tuple(fx_utils.said(taker, reason) for taker in takers), frozenset(takers))


class _Plan:
    """What of a graph is to be sent to which GPU, and what is not, and why."""

    def __init__(self) -> None:
        self.inputs: dict[torch.device, list[_Input]] = {}
        self.groups: dict[torch.device, list[Group]] = {}
        self.left: list[str] = []
        self.told_of: set[Node] = set()
        self.uses = 0
        self._bytes = 0

    def add_input(self, each: _Input) -> None:
        """Decide on an input that the CPU does not compute with."""
        if self._fits(_why_not(each), each.on_gpu, each.bytes):
            self.inputs.setdefault(fx_utils.value(each.on_gpu[0]).device, []).append(each)
            self.uses += len(each.uses)

    def add_group(self, group: Group, reason: str | None) -> None:
        """Decide on inputs that the CPU computes with; `reason` is why they are left, if they are."""
        on_gpu = [use for use in group.uses if fx_utils.lies_elsewhere(use[0])]
        total = sum(fx_utils.value(each).nbytes for each in dict.fromkeys(value for _, value in group.uses))
        takers = [taker for taker, value in on_gpu if not _known_tells(taker, value)]
        if self._fits(reason, takers, total):
            self.groups.setdefault(fx_utils.value(on_gpu[0][0]).device, []).append(group)
            self.uses += len(on_gpu)

    @property
    def takers(self) -> list[Node]:
        """The nodes on a GPU that take what is sent."""
        of_inputs = [
            taker for of_device in self.inputs.values() for each in of_device for taker in each.on_gpu
        ]
        of_groups = [use for of_device in self.groups.values() for group in of_device for use in group.uses]
        return of_inputs + [taker for taker, _ in of_groups if fx_utils.lies_elsewhere(taker)]

    def leave_a_few_numbers(self, numbers: Iterable[Node]) -> None:
        """Leave to PyTorch what it moves to the GPU itself in modes with CUDA graphs, without the host waiting, if it is all there is, and little.

        `numbers` are all inputs of the graph that are numbers on the CPU. PyTorch's pass concatenates them, which gives numbers of
        several types one type: an int64 beside a float64 comes back as a float64.
        """
        if not torch_private.cudagraphs_asked() or len({fx_utils.value(each).dtype for each in numbers}) > 1:
            return
        inputs = [each for of_device in self.inputs.values() for each in of_device]
        groups = [group for of_device in self.groups.values() for group in of_device]
        values = [*(each.value for each in inputs), *(value for group in groups for value in group.values)]
        takers = self.takers
        count = len(inputs) + sum(len(group.inputs) for group in groups)
        # In torch 2.11 its pass returns on the GPU what it has moved there, for which a backward then was not compiled: such programs crash.
        leaves = any(group.is_written_back for group in groups) or any(map(_is_returned, values))
        if count < FEW_NUMBERS and not leaves and not _has_more_than_numbers(values, takers):
            self._leave(dict.fromkeys(takers), ONLY_A_FEW)
            self.inputs, self.groups, self.uses = {}, {}, 0

    def _fits(self, reason: str | None, takers: Sequence[Node], size: int) -> bool:
        if reason is None and self._bytes + size > MAX_BYTES_OF_GRAPH:
            reason = TOO_MANY
        if reason is None:
            self._bytes += size
        else:
            self._leave(takers, reason)
        return reason is None

    def _leave(self, takers: Iterable[Node], reason: str) -> None:
        for taker in takers:
            self.left.append(fx_utils.said(taker, reason))
            self.told_of.add(taker)


def _plan(graph: Graph) -> _Plan:
    plan = _Plan()
    groups = [group for group in hoist.groups(graph, _may_be_sent) if _is_for_gpu(group)]
    computed_with = {node for group in groups for node in group.inputs}
    late, is_backward = hoist.after_first_write(graph), hoist.is_backward(graph)
    for group in groups:
        plan.add_group(group, _why_not_group(group, late, is_backward=is_backward))
    for each in _inputs(graph):
        if each.value not in computed_with:
            plan.add_input(each)
    plan.leave_a_few_numbers(_numbers(graph))
    return plan


def _numbers(graph: Graph) -> list[Node]:
    """Return the inputs of a graph that are tensors of no dimensions on the CPU."""
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        and not value.dim()
        and value.device.type == "cpu"
    ]


def _has_more_than_numbers(values: Iterable[Node], takers: Iterable[Node]) -> bool:
    """Whether a value has dimensions, or anybody takes one otherwise than as a number."""
    return any(fx_utils.value(each).dim() for each in values) or not all(map(fx_utils.is_pointwise, takers))


def _is_returned(value: Node) -> bool:
    return any(user.op == "output" for user in value.users)


def _known_tells(taker: Node, value: Node) -> bool:
    """Whether `constants.py` gives a reason why a value is left."""
    return value.op != "placeholder" and (taker.target is fx_utils.COPY or taker.target in fx_utils.INDEXING)


def _is_for_gpu(group: Group) -> bool:
    """Whether the GPU takes anything of a group, and the CPU computes more than the GPU would as well, or returns it."""
    on_gpu = any(fx_utils.lies_elsewhere(taker) for taker, _ in group.uses)
    return on_gpu and any(_is_returned(each) or not _is_same(each) for each in group.computed)


def _may_be_sent(node: Node) -> bool:
    return _why_not_value(node) is None


def _why_not_group(group: Group, late: Collection[Node], *, is_backward: bool) -> str | None:
    if is_backward:
        return SAVED
    if any(taker in late for taker, _ in group.uses):
        return CHANGED
    return _why_not_uses(group.uses)


def _inputs(graph: Graph) -> Iterator[_Input]:
    """Yield the inputs on the CPU that the GPU takes."""
    for node in graph.nodes:
        if node.op == "placeholder" and fx_utils.is_on_cpu(node):
            found = _input(node)
            if found.on_gpu:
                yield found


def _input(value: Node) -> _Input:
    same, uses, waiting = [], [], [value]
    while waiting:
        each = waiting.pop()
        for user in each.users:
            if _is_same(user):
                same.append(user)
                waiting.append(user)
            elif user.op != "output" or each is not value:
                uses.append((user, each))
    return _Input(value, tuple(same), tuple(uses))


def _is_same(node: Node) -> bool:
    """Whether a node on the CPU only gives a number another type, and both processors round it alike: a Python float has one."""
    if node.target is not torch.ops.prims.convert_element_type.default or not fx_utils.is_on_cpu(node):
        return False
    before, after = node.args
    return after in {torch.float32, torch.float64} and not fx_utils.value(before).dtype.is_complex


def _why_not(each: _Input) -> str | None:
    return _why_not_uses(each.uses) or _why_not_value(each.value)


def _why_not_uses(uses: Iterable[tuple[Node, Node]]) -> str | None:
    devices = set()
    for taker, value in uses:
        if reason := _why_not_use(taker, value):
            return reason
        devices.add(fx_utils.value(taker).device)
    return SEVERAL_GPUS if len(devices) > 1 else None


def _why_not_value(node: Node) -> str | None:
    value = fx_utils.value(node)
    if not fx_utils.has_static_layout(node):
        return RUN_TIME_SIZE
    plain = value.layout is torch.strided and not (value.is_conj() or value.is_neg() or value.is_quantized)
    if not plain or not value.is_contiguous() or not value.numel():
        return NOT_PLAIN
    return TOO_LARGE if value.nbytes > MAX_BYTES else None


def _why_not_use(taker: Node, value: Node) -> str | None:
    if fx_utils.is_mutating(taker):
        return CHANGED
    if not fx_utils.lies_elsewhere(taker):
        return USED_HERE
    if taker.target is fx_utils.COPY:
        return None if _lie_alike(taker, value) else NOT_PLAIN
    if taker.target in fx_utils.INDEXING and value not in (taker.args[0], *taker.args[2:]):
        return None if fx_utils.value(value).dtype in fx_utils.INDEX_TYPES else A_MASK
    return None if fx_utils.is_pointwise(taker) and not fx_utils.value(value).dim() else OTHER_USE


def _lie_alike(one: Node, other: Node) -> bool:
    first, second = (fx_utils.value(each) for each in (one, other))
    return (first.dtype, first.size(), first.stride()) == (second.dtype, second.size(), second.stride())


def _change(
    graph: Graph, device: torch.device, inputs: Sequence[_Input], groups: Sequence[Group]
) -> dict[str, tuple[str, ...]]:
    """Change one use after the other: whatever ends this early leaves a graph that computes the same. Returns `Moved.lines`."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    uses = [use for group in groups for use in group.uses]
    taken = dict.fromkeys(value for _, value in uses)
    with graph.inserting_before(first):
        computed = {each: by for group in groups for each, by in hoist.hoist(graph, group).items()}
        batches = hoist.batches(graph, [computed[each] for each in taken if each in computed])
        direct = [each for each in taken if each not in computed]
        values = [*(each.value for each in inputs), *direct, *(batch.together for batch in batches)]
        name, lines = _name(graph), tuple(map(fx_utils.where_taken, values))
        there = dict(zip(values, _send(graph, device, values, name), strict=True))
        for batch in batches:
            there.update(batch.parts(graph, there[batch.together]))
    for each in inputs:
        _change_input(graph, device, each, there[each.value])
    for taker, value in uses:
        fx_utils.take(graph, taker, value, there[computed.get(value, value)])
    for value, by in reversed(computed.items()):
        value.replace_all_uses_with(by)
    fx_utils.remove_unused(graph, computed)
    return {name: lines}


def _change_input(graph: Graph, device: torch.device, each: _Input, there: Node) -> None:
    for node in each.same:
        node.replace_input_with(each.value, there)
        node.meta["val"] = torch_private.fake_on(device, node.meta["val"])
    for taker, value in each.uses:
        fx_utils.take(graph, taker, value, there if value is each.value else value)


def _send(graph: Graph, device: torch.device, values: list[Node], name: str) -> list[Node]:
    """Add what sends values to a GPU, at the place where nodes are being inserted; return them as they are there."""
    kinds = kinds_text([fx_utils.value(each) for each in values])
    sent = graph.call_function(SENT, (values, device, kinds, name))
    sent.meta["val"] = []
    there: dict[int, Node] = {}
    for number, piece in enumerate(pieces(kinds)):
        together = graph.call_function(operator.getitem, (sent, number))
        together.meta["val"] = torch_private.fake_on(device, _like(values, piece))
        sent.meta["val"].append(together.meta["val"])
        for each in piece.values:
            there[each.index] = fx_utils.part(graph, together, each.start, fx_utils.value(values[each.index]))
    return [there[index] for index in range(len(values))]


def _like(values: Sequence[Node], piece: Piece) -> torch.Tensor:
    return fx_utils.value(values[piece.values[0].index]).new_empty(piece.length)


def _name(graph: Graph) -> str:
    """Return what tells graphs of a process apart, and is the same in the next: its names alone, as there are objects in it."""
    names = " ".join(node.name for node in graph.nodes)
    return hashlib.sha256(names.encode()).hexdigest()[:12]
