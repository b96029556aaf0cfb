"""The default process group: its store, the agreement of its ranks, and the roles of this process among them."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.decisions.ranks.consensus import ALONE, WAIT_LIMIT_S, Agreement
from pygraphd.client.decisions.ranks.write_once import OPERATION_S, Registers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.common.report import Report
    from pygraphd.client.decisions.ranks.consensus import RankRole
    from pygraphd.schema.keys import Environment
    from pygraphd.schema.messages import Graph

PREFIX = "pygraph/2"
"""Prefix of our keys in the store. Its number changes whenever the meaning of a register does."""


class GroupStore:
    """The store of one process group.

    Holds no reference to the user's store: on rank 0 it is the server, whose port a later group may need, and a FileStore deletes its
    file with its last user. A TCPStore serves one operation at a time, and an operation of the user's may wait there for minutes. So it
    is asked over a connection of our own.
    """

    def __init__(self, store: Any) -> None:
        self._users = weakref.ref(store)
        self._own: Any = None
        self._pid = os.getpid()

    def is_of(self, store: object) -> bool:
        """Return whether this wraps `store`."""
        return self._users() is store

    def connect(self) -> Any:
        """Return a store with our keys only; raises ConnectionError if the group is gone, and in a forked child."""
        users = self._users()
        if users is None:
            raise ConnectionError("the process group is gone")
        if self._pid != os.getpid():
            raise ConnectionError("a fork shares the connection")
        if self._own is None and _is_tcp(users):
            self._own = users.clone()
        return torch.distributed.PrefixStore(PREFIX, self._own or users)


def _is_tcp(store: Any) -> bool:
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    return isinstance(store, torch.distributed.TCPStore)


class Groups:
    """The agreement of the current process group. A new group gets a new one."""

    def __init__(
        self, report: Report, wait_limit_s: float = WAIT_LIMIT_S, operation_s: float = OPERATION_S
    ) -> None:
        self._report = report
        self._wait_limit_s = wait_limit_s
        self._operation_s = operation_s
        self._store: GroupStore | None = None
        self._agreement: Agreement | None = None

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
        if not _several_ranks():
            return None
        if reason := torch_private.missing_for_groups():
            self._report.count_failure(f"ranks: {reason}")
            return None
        store = torch_private.default_store()
        if self._agreement is None or self._store is None or not self._store.is_of(store):
            self._store = GroupStore(store)
            # The process keeps its name if PyGraph is enabled anew: it goes on to lead where it has led.
            name = f"{torch.distributed.get_rank()}:{os.getpid()}"
            registers = Registers(self._store.connect, name, self._operation_s)
            self._agreement = Agreement(registers, self._report, self._wait_limit_s)
        return self._agreement


def _several_ranks() -> bool:
    distributed = torch.distributed
    return bool(
        distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    )
