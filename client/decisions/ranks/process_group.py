"""The default process group: its store, the agreement of its ranks, and the roles of this process among them."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import NotRelocatableError, RanksError
from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.decisions.ranks.atomic_commit import LONGEST_POLL_S, UNREACHABLE
from pygraphd.client.decisions.ranks.consensus import ALONE, MAX_AGREED_GRAPHS, WAIT_LIMIT_S, Agreement
from pygraphd.client.decisions.ranks.late_ranks import MAX_LATE, TOO_LATE, LateRanks
from pygraphd.client.decisions.ranks.lockstep import Lockstep
from pygraphd.client.decisions.ranks.write_once import OPERATION_S, RegisterError, Registers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pygraphd.client.common.report import Report
    from pygraphd.client.decisions.ranks.consensus import RankRole
    from pygraphd.schema.keys import Environment
    from pygraphd.schema.messages import Graph

PREFIX = "pygraph/3"
"""Prefix of our keys in the store. Its number changes whenever the meaning of a register does."""
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
"""With 1, NCCL registers memory in captures. Other ranks then know its addresses, so that it cannot move, and all ranks have to capture at once."""
COLLECTIVES_OFF = "it has collectives, and PYGRAPH_COLLECTIVES is 0"
POLL_S_OF_EACH = 2e-4
"""Seconds between polls of a rank, for each rank of the job: one thread serves the store, and so gets 5,000 polls a second at most."""
MAX_GROUPS = 256
"""Groups whose late ranks are counted: those met last. The store has the counts of all groups."""
MIN_TIMEOUT_S = 90.0
"""Shortest time-out of a group in seconds. An attempt may hold a rank for over a minute, and c10d must not end the ranks that wait for it
in a collective."""
_CAPTURED = tuple(
    f"_c10d_functional::{each}" for each in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
)
"""Prefixes of the names of operators that may be captured. Each of them ends on a rank only when all ranks have begun it. So ranks whose GPUs
are idle are at the same call, which a broadcast does not ensure."""


class GroupStore:
    """The store of one process group.

    Holds no reference to the user's store: on rank 0 it is the server, whose port a later group may need, and a FileStore deletes its
    file with its last user. A client of a TCPStore runs one operation at a time, and an operation of the user's may take minutes. So a
    TCPStore is used through a connection of our own.
    """

    def __init__(self, store: Any) -> None:
        self.wrapped: weakref.ref[Any] = weakref.ref(store)
        """The user's store; None: it is gone."""
        self._own: Any = None
        self._pid = os.getpid()

    def connect(self) -> Any:
        """Return a store with our keys only; raises ConnectionError if the group is gone, and in a forked child."""
        users = self.wrapped()
        if users is None:
            raise ConnectionError("the process group is gone")
        if self._pid != os.getpid():
            raise ConnectionError("a fork shares the connection")
        if self._own is None and _is_tcp(users):
            self._own = users.clone()
        return torch.distributed.PrefixStore(_prefix(), self._own or users)


def _prefix() -> str:
    """Return the prefix of the keys of these ranks. torchrun's store may outlive ranks, and hold votes of some that it has restarted."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # On several hosts the counts may differ: each counts the restarts for failures of its own ranks.
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return f"{PREFIX}/{restarts}" if is_one_host and restarts != "0" else PREFIX


def _is_tcp(store: Any) -> bool:
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    return isinstance(store, torch.distributed.TCPStore)


class _Group(NamedTuple):
    """The group of a graph's collectives: its name, lowest global rank, number of ranks and time-out in seconds."""

    agreement: Agreement
    name: str
    lowest: int
    size: int
    timeout_s: float


class Groups:
    """The agreement of the current process group. A new group gets a new one."""

    def __init__(
        self,
        report: Report,
        wait_limit_s: float = WAIT_LIMIT_S,
        operation_s: float = OPERATION_S,
        *,
        captures: bool = True,
    ) -> None:
        """Only if it `captures`, graphs with collectives may be recorded."""
        self._captures = captures
        self._report = report
        self._wait_limit_s = wait_limit_s
        self._operation_s = operation_s
        self._store: GroupStore | None = None
        self._agreement: Agreement | None = None
        self._attempts = BoundedLRU[str, int](MAX_AGREED_GRAPHS)
        self._late = BoundedLRU[str, LateRanks](MAX_GROUPS)

    def why_not_captured(self, collectives: Collection[tuple[str, str]]) -> str | None:
        """Return why no call of `collectives` can be captured, as far as this rank knows by itself; None if it may be.

        `collectives` are those of a graph, each an operator and the name of its group.
        """
        try:
            return _setting_against(self._group(collectives))
        except NotRelocatableError as error:
            return str(error)

    def lockstep(self, collectives: Collection[tuple[str, str]], graph: str) -> Lockstep:
        """Return the next attempt to record a graph that calls `collectives`.

        Raises NotRelocatableError if they cannot be captured, and RanksError if the store does not answer.
        """
        group = self._group(collectives)
        # Groups that do not overlap may have the same name, as those of `split_group` in torch 2.11.
        name = f"{group.name}/{group.lowest}/{group.size}"
        attempts = f"recorded/{name}/{graph}"
        # Of this group alone: a rank may run the graph in several groups, and its peer in one of them.
        self._attempts[attempts] = number = self._attempts.get(attempts, 0) + 1
        attempt = f"{attempts}/{number}"
        longest_s = max(LONGEST_POLL_S, POLL_S_OF_EACH * torch.distributed.get_world_size())
        registers = group.agreement.registers
        try:
            late = group.agreement.reachability.ask(lambda: self._late_of(name).read(registers))
        except RegisterError as error:
            # This rank has not voted. One that has, and cannot read the result, waits for minutes.
            raise RanksError(UNREACHABLE) from error
        lockstep = Lockstep(
            registers,
            attempt,
            group.size,
            group.timeout_s,
            longest_poll_s=longest_s,
            group=name,
            late_before=late,
            present_timeout_s=functools.partial(_present_timeout_s, group.name, group.timeout_s),
        )
        if reason := _setting_against(group) or (TOO_LATE if late >= MAX_LATE else None):
            # Told to the others, which would wait for this rank's vote until the limit.
            lockstep.refuse(reason, for_good=True)
            raise NotRelocatableError(reason)
        return lockstep

    def note_late(self, lockstep: Lockstep) -> None:
        """Note that this rank has waited in vain in an attempt. Raises nothing."""
        # First, so that it counts here even if no other rank can be told.
        late = self._late_of(lockstep.group)
        late.note(lockstep.late_before)
        # That of the attempt: c10d, which may raise if the group has ended meanwhile, is not asked.
        if (agreement := self._agreement) is not None:
            with contextlib.suppress(RegisterError):
                agreement.reachability.ask(lambda: late.tell(agreement.registers, lockstep.late_before))

    def _late_of(self, group: str) -> LateRanks:
        # Of each group by itself: others, as those of other tensor-parallel ranks, need not give up.
        if (late := self._late.get(group)) is None:
            self._late[group] = late = LateRanks(group)
        return late

    def _group(self, collectives: Collection[tuple[str, str]]) -> _Group:
        """Return the group of all `collectives`; raises NotRelocatableError if they cannot be captured, whatever the settings."""
        if not self._captures:
            raise NotRelocatableError(COLLECTIVES_OFF)
        others = [operator for operator, _ in sorted(collectives) if not operator.startswith(_CAPTURED)]
        if others:
            raise NotRelocatableError(f"it calls {others[0]}")
        names = {group for _, group in collectives}
        # With several groups, ranks could not tell that all of them are at the same call.
        agreement = self.agreement() if len(names) == 1 else None
        if agreement is None:
            raise NotRelocatableError(f"{len(names)} process groups, or no group of several ranks")
        (name,) = names
        try:
            lowest, size, timeout_s, kind = torch_private.group_on_gpus(name)
        except Exception as error:  # c10d raises several, and the group may have no backend for GPUs
            raise NotRelocatableError(f"its process group was not found: {type(error).__name__}") from error
        if kind != "ProcessGroupNCCL":
            raise NotRelocatableError(f"its group is served by {kind}")
        return _Group(agreement, name, lowest, size, timeout_s)

    def role(self, leader_key: str, graphs: Sequence[Graph], environment: Environment) -> RankRole:
        """Return the role of this process for some graphs; without a process group it decides alone.

        One rank leads for all graphs with the same `leader_key`: a forward and its backward.
        """
        agreement = self.agreement()
        if agreement is None:
            return ALONE
        role = agreement.role(leader_key, [graph.digest for graph in graphs], environment.digest())
        self._report.count(**{"led" if role.leads else "followed": len(graphs)})
        return role

    def agreement(self) -> Agreement | None:
        """Return the agreement of the default process group; None without a group of several ranks."""
        if not has_other_ranks():
            return None
        if reason := torch_private.missing_for("groups"):
            self._report.count_failure(f"ranks: {reason}")
            return None
        store = torch_private.default_store()
        if self._agreement is None or self._store is None or self._store.wrapped() is not store:
            self._store = GroupStore(store)
            # The process keeps its name if PyGraph is enabled anew: it goes on to lead where it has led.
            name = f"{torch.distributed.get_rank()}:{os.getpid()}"
            registers = Registers(self._store.connect, name, self._operation_s)
            self._agreement = Agreement(registers, self._report, self._wait_limit_s)
        return self._agreement


def _present_timeout_s(name: str, before_s: float) -> float:
    """Return the time-out of a group in seconds, which a program may change; `before_s` if the group is gone."""
    try:
        return torch_private.group_on_gpus(name)[2]
    except Exception:  # noqa: BLE001 - c10d raises several
        return before_s


def _setting_against(group: _Group) -> str | None:
    """Return why a group's collectives are not to be captured in this process, as NCCL and c10d are set; None if they may be."""
    register, nvls, hook = (
        os.environ.get(each, "")
        for each in (GRAPH_REGISTER, "NCCL_NVLS_ENABLE", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK")
    )
    if register != "0":
        return f"{GRAPH_REGISTER}={register}"
    # c10d then ends no process, but has a collective raise after the time-out, which a replay cannot.
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if os.environ.get(name, "0") != "0":
            return name
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "2":
            return f"{name}=2"
    if hook not in {"", "0"}:
        return "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    # NCCL takes NVLink multicast for more than two GPUs from Hopper on.
    if nvls != "0" and group.size > 2 and torch.cuda.get_device_capability() >= (9, 0):
        return "NVLink multicast may be in use (NCCL_NVLS_ENABLE=0 switches it off)"
    return f"its group has a timeout of {group.timeout_s:g} s" if group.timeout_s < MIN_TIMEOUT_S else None


def has_other_ranks() -> bool:
    """Return whether this process has joined a process group of several ranks."""
    distributed = torch.distributed
    return bool(
        distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    )
