"""Places small CPU inputs of a graph on the GPU: a temperature, a learning rate, a buffer left on the CPU.

They are sent before the captured partition runs, if they have changed (`upload.py`), and so are values that the CPU computes from them
(`hoist.py`). Three kinds of use are changed: copies to the GPU, indices into GPU tensors, and scalars of element-wise operators. CPU uses of
an input, and a returned input, stay as they are.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections import Counter
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils, hoist
from pygraphd.client.placement.fx_utils import A_MASK, RUN_TIME_SIZE, PassResult
from pygraphd.client.placement.upload import SENT, STAGED, packs, specs_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch.fx import Graph, Node

    from pygraphd.client.placement.hoist import Group

    Send = Callable[[Graph, torch.device, list[Node], str], list[Node]]
    """Adds nodes that send values to a GPU, for a graph of the given name; returns the nodes of the sent values."""

MAX_INPUT_BYTES = 16 << 10
"""The largest input that is sent, in bytes: comparing it costs the host less than 1 us."""
MAX_BYTES_OF_GRAPH = 64 << 10
MAX_COMPUTED_BYTES = 1 << 20
"""Bound in bytes of the values that the CPU computes from a graph's inputs and sends: comparing costs no more than computing."""
FEW_SCALARS = 8
"""Fewer scalars than this are sent as PyTorch sends them: copying them at every call costs less than comparing; the bound is an estimate."""

TOO_LARGE = "it is larger than 16 KiB"
TOO_MANY = "the small inputs of this graph take more than 64 KiB"
TOO_MUCH = "values that the CPU computes from the inputs of this graph take more than 1 MiB"
NOT_PLAIN = "it is no plain, contiguous tensor"
CHANGED = "the graph changes it in place"
USED_HERE = "the CPU computes with it, too, in a way that cannot be moved"
SAVED = "the CPU computes with it in a backward, and its forward may have saved it on the GPU"
OTHER_USE = "it is used in a way that may depend on its device"
SEVERAL_GPUS = "more than one GPU uses it"
ONLY_A_FEW = "it is one of a few scalars, which PyTorch sends as fast"


def place_inputs(graph: Graph) -> PassResult:
    """Replace the GPU's uses of small CPU inputs by uses of tensors that are sent at the beginning of a call."""
    plan = _plan(graph)
    # Asked before the change, which erases some of these nodes.
    handled = frozenset(plan.reported.union(plan.users))
    send = _copy if plan.are_few_scalars else _send
    for device, groups in plan.groups.items():
        _change(graph, device, groups, send)
    return PassResult(plan.uses, tuple(plan.left), handled)


def skip_all(graph: Graph, reason: str) -> PassResult:
    """Return the result for a graph that is not changed, for `reason`."""
    users = [user for group in hoist.find_groups(graph, _may_be_moved) for user in _reported_here(group)]
    return PassResult(0, tuple(fx_utils.skip_message(user, reason) for user in users), frozenset(users))


class _Plan:
    """The groups of a graph that are to be sent, by GPU, and the messages for the others."""

    def __init__(self) -> None:
        self.groups: dict[torch.device, list[Group]] = {}
        self.left: list[str] = []
        self.reported: set[Node] = set()
        self.uses = 0
        self.are_few_scalars = False
        """Whether the values are sent as PyTorch sends them in modes with CUDA graphs: by one copy from pinned memory at every call."""
        self._bytes = Counter[str]()

    def add(self, group: Group, reason: str | None) -> None:
        """Accept a group, or skip it for `reason`."""
        size = 0 if reason else sum(fx_utils.fake(each).nbytes for each in group.sent)
        limit, beyond = (MAX_COMPUTED_BYTES, TOO_MUCH) if group.needs_cpu else (MAX_BYTES_OF_GRAPH, TOO_MANY)
        if self._bytes[beyond] + size > limit:
            reason = beyond
        if reason is not None:
            self._skip(_reported_here(group), reason)
            return
        self._bytes[beyond] += size
        self.groups.setdefault(fx_utils.fake(group.gpu_uses[0][0]).device, []).append(group)
        self.uses += len(group.gpu_uses)

    @property
    def users(self) -> list[Node]:
        """The nodes on a GPU that use a value that is sent."""
        return [
            user for of_device in self.groups.values() for group in of_device for user, _ in group.gpu_uses
        ]

    def find_few_scalars(self, numbers: Iterable[Node]) -> None:
        """Have a few scalars sent as PyTorch does; skip them in modes with CUDA graphs, in which PyTorch does so itself.

        `numbers` are all scalar CPU inputs of the graph. With several dtypes this is not done: PyTorch's pass concatenates them, and an
        int64 beside a float64 becomes a float64.
        """
        if len({fx_utils.fake(each).dtype for each in numbers}) > 1:
            return
        groups = [group for of_device in self.groups.values() for group in of_device]
        values, users = [value for group in groups for value in group.values], self.users
        count = sum(len(group.inputs) for group in groups)
        # In torch 2.11 PyTorch's pass also returns moved scalars on the GPU, which crashes a backward compiled for CPU scalars.
        leaves = any(group.is_written_back for group in groups) or any(map(hoist.is_returned, values))
        are_scalars = not any(fx_utils.fake(each).dim() for each in values)
        if count >= FEW_SCALARS or leaves or not (are_scalars and all(map(fx_utils.is_pointwise, users))):
            return
        # In default mode: Inductor may reuse the memory of a computed value while the GPU still reads it from there.
        if any(group.needs_cpu for group in groups) and not torch_private.cudagraphs_asked():
            return
        if torch_private.cudagraphs_asked():
            self._skip(dict.fromkeys(users), ONLY_A_FEW)
            self.groups, self.uses = {}, 0
        else:
            self.are_few_scalars = True

    def _skip(self, users: Iterable[Node], reason: str) -> None:
        for user in users:
            self.left.append(fx_utils.skip_message(user, reason))
            self.reported.add(user)


def _plan(graph: Graph) -> _Plan:
    plan = _Plan()
    # From the first node on that writes to an input.
    late = frozenset(itertools.dropwhile(lambda node: not fx_utils.is_mutating(node), graph.nodes))
    is_backward = hoist.is_backward(graph)
    for group in hoist.find_groups(graph, _may_be_moved):
        if group.gpu_uses:
            plan.add(group, _why_not(group, late, is_backward=is_backward))
    plan.find_few_scalars(_scalars(graph))
    return plan


def _scalars(graph: Graph) -> list[Node]:
    """Return the inputs of a graph that are 0-d tensors on the CPU."""
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        and not value.dim()
        and value.device.type == "cpu"
    ]


def _reported_here(group: Group) -> list[Node]:
    """Return the users of a group on a GPU for which `constants.py` has no message."""
    return [
        user
        for user, value in group.gpu_uses
        if value.op == "placeholder" or not (user.target is fx_utils.COPY or user.target in fx_utils.INDEXING)
    ]


def _may_be_moved(node: Node) -> bool:
    """Return whether a node is an input that may be sent, or a value that may be computed from inputs that may be sent."""
    # Index values of a mask have more bytes than the mask, but are computed within it.
    limit = MAX_INPUT_BYTES if node.op == "placeholder" else MAX_COMPUTED_BYTES * fx_utils.fake(node).itemsize
    return _why_not_value(node, limit) is None


def _why_not(group: Group, late: Collection[Node], *, is_backward: bool) -> str | None:
    if not group.needs_cpu:
        return _why_not_uses(group.uses) or next(filter(None, map(_why_not_value, group.inputs)), None)
    if is_backward:
        return SAVED
    # Values are computed at the beginning: a use after a write would read the old ones.
    if any(user in late for user, _ in group.uses):
        return CHANGED
    return _why_not_uses(group.uses)


def _why_not_uses(uses: Iterable[tuple[Node, Node]]) -> str | None:
    devices = set()
    for user, value in uses:
        if reason := _why_not_use(user, value):
            return reason
        devices.add(fx_utils.fake(user).device)
    return SEVERAL_GPUS if len(devices) > 1 else None


def _why_not_value(node: Node, limit: int = MAX_INPUT_BYTES) -> str | None:
    value = fx_utils.fake(node)
    if not fx_utils.has_static_layout(node):
        return RUN_TIME_SIZE
    plain = value.layout is torch.strided and not (value.is_conj() or value.is_neg() or value.is_quantized)
    if not plain or not value.is_contiguous() or not value.numel():
        return NOT_PLAIN
    return TOO_LARGE if value.nbytes > limit else None


def _why_not_use(user: Node, value: Node) -> str | None:
    if fx_utils.is_mutating(user):
        return CHANGED
    if not fx_utils.is_on_gpu(user):
        return USED_HERE
    if user.target is fx_utils.COPY:
        return None if fx_utils.has_same_layout(fx_utils.fake(user), fx_utils.fake(value)) else NOT_PLAIN
    if user.target in fx_utils.INDEXING and value not in (user.args[0], *user.args[2:]):
        return None if fx_utils.fake(value).dtype in fx_utils.INDEX_TYPES else A_MASK
    return None if fx_utils.is_pointwise(user) and not fx_utils.fake(value).dim() else OTHER_USE


def _change(graph: Graph, device: torch.device, groups: Sequence[Group], send: Send) -> None:
    """Change the uses one by one: an exception in between leaves a graph that computes the same."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    taken = dict.fromkeys(value for group in groups for value in group.sent)
    # Collected first: the copies that `hoist` adds are users as well.
    uses = [use for group in groups for use in group.uses]
    hoisted = [group for group in groups if group.needs_cpu]
    with graph.inserting_before(first):
        computed = {each: by for group in hoisted for each, by in hoist.hoist(graph, group).items()}
        packed = [*taken] if send is _copy else [each for each in taken if each in computed]
        if send is _copy:
            batches = [_stage(graph, device, packed)]
        else:
            # Values that the CPU computes need a C++ kernel in any case, which also packs them.
            batches = hoist.concatenate(graph, [computed[each] for each in packed])
        values = [each for each in taken if each not in packed] + [batch.packed for batch in batches]
        there = dict(zip(values, send(graph, device, values, _graph_name(graph)), strict=True))
        for batch in batches:
            there.update(batch.split(graph, there[batch.packed]))
    for group in groups:
        if group not in hoisted:
            there |= _move_casts(group, device, there)
    for user, value in uses:
        fx_utils.replace_use(graph, user, value, there[computed.get(value, value)])
    # What still uses the originals are returns and writes back to inputs: then the originals can go.
    for value, by in reversed(computed.items()):
        value.replace_all_uses_with(by)
    fx_utils.remove_unused(graph, computed)


def _move_casts(group: Group, device: torch.device, there: Mapping[Node, Node]) -> dict[Node, Node]:
    """Have the GPU cast an input that it receives; return the casts, each as the value on the GPU."""
    for cast in group.computed:
        for value in group.inputs:
            cast.replace_input_with(value, there[value])
        cast.meta["val"] = torch_private.fake_on(device, fx_utils.fake(cast))
    return {cast: cast for cast in group.computed}


def _send(graph: Graph, device: torch.device, values: list[Node], name: str) -> list[Node]:
    """Add the node that sends values to a GPU, at the insertion point; return the nodes of the sent values."""
    specs = specs_text([fx_utils.fake(each) for each in values])
    sent = graph.call_function(SENT, (values, device, specs, name))
    sent.meta["val"] = []
    there: dict[int, Node] = {}
    for number, pack in enumerate(packs(specs)):
        together = graph.call_function(operator.getitem, (sent, number))
        like = fx_utils.fake(values[pack.values[0].index]).new_empty(pack.length)
        together.meta["val"] = torch_private.fake_on(device, like)
        sent.meta["val"].append(together.meta["val"])
        for each in pack.values:
            there[each.index] = fx_utils.add_slice(
                graph, together, each.start, fx_utils.fake(values[each.index])
            )
    return [there[index] for index in range(len(values))]


def _stage(graph: Graph, device: torch.device, scalars: list[Node]) -> hoist.Batch:
    """Add the node that copies scalar inputs of one dtype to pinned memory, without C++ code of Inductor's."""
    staged = graph.call_function(STAGED, (scalars, device))
    staged.meta["val"] = fx_utils.fake(scalars[0]).new_empty(len(scalars))
    return hoist.Batch(staged, tuple(scalars))


def _copy(graph: Graph, device: torch.device, values: list[Node], name: str) -> list[Node]:
    """Add nodes that copy staged values to a GPU, at the insertion point; return the copies. `keep_results` keeps their memory from others."""
    there = []
    for each in values:
        there.append(graph.call_function(torch.ops.prims.device_put.default, (each, device, True)))
        there[-1].meta["val"] = torch_private.fake_on(device, fx_utils.fake(each))
    return there


def _graph_name(graph: Graph) -> str:
    """Return a name for a graph that is the same in every process: a hash of the names of its nodes."""
    # The name becomes part of generated code, which Inductor's caches hand to other processes.
    names = " ".join(node.name for node in graph.nodes)
    return hashlib.sha256(names.encode()).hexdigest()[:12]
