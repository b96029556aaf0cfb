"""The default process group as PyGraph sees it: which one is there now, and a way to its store that disturbs nobody."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.decisions.ranks.consensus import WAIT_LIMIT_S, Agreement
from pygraphd.client.decisions.ranks.write_once import OPERATION_S, Registers

if TYPE_CHECKING:
    from pygraphd.client.common.report import Report

PREFIX = "pygraph/1"
"""Keeps our keys from the user's; another number wherever a register means something else."""


class GroupStore:
    """The store of one process group; see `write_once.Store`.

    The user's store is never kept: on rank 0 it is the server, whose port a later group may need, and a FileStore
    removes its file when its last user is gone. A TCPStore is asked over a connection of our own, since it lets one operation in
    at a time, and one of the user's may wait there for minutes.
    """

    def __init__(self, store: Any) -> None:
        self._users = weakref.ref(store)
        self._own: Any = None
        self._pid = os.getpid()

    def is_of(self, store: object) -> bool:
        """Return whether this is that store."""
        return self._users() is store

    def check(self, keys: list[str]) -> bool:  # noqa: D102 - see registers.Store
        return bool(self._store().check(keys))

    def get(self, key: str) -> bytes:  # noqa: D102 - see registers.Store
        return bytes(self._store().get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # noqa: D102 - see registers.Store
        return bytes(self._store().compare_set(key, expected, desired))

    def _store(self) -> Any:
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
    """The agreement of the process group that is there now. A new group has a new one."""

    def __init__(
        self, report: Report, wait_limit_s: float = WAIT_LIMIT_S, operation_s: float = OPERATION_S
    ) -> None:
        self._report = report
        self._wait_limit_s = wait_limit_s
        self._operation_s = operation_s
        self._store: GroupStore | None = None
        self._agreement: Agreement | None = None

    def agreement(self) -> Agreement | None:
        """Return what the ranks of the default process group agree by; None where there is no group of several."""
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
            registers = Registers(self._store, name, self._operation_s)
            self._agreement = Agreement(registers, self._report, self._wait_limit_s)
        return self._agreement


def _several_ranks() -> bool:
    distributed = torch.distributed
    return bool(
        distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    )
