"""Write-once registers in the store of a process group: the decision for a graph, and the rank that leads for it.

The first write holds for all ranks. A collective would not do: ranks compile in different orders, and a collective of PyGraph's
could be matched with one of the user's. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pygraphd.schema import messages
from pygraphd.schema.checks import InvalidMessageError, check_digest
from pygraphd.schema.messages import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATION_S = 5.0
"""Seconds that one operation may take; tens to hundreds of microseconds are usual."""

_T = TypeVar("_T")


class RegisterError(Exception):
    """A register gave no answer, or an invalid one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The content of a register: the decision for a graph, and the environment of the rank that decided."""

    environment: str
    decision: Decision

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)


class Registers:
    """The registers of one group, for the rank called `name`. Every method raises RegisterError, and ends in `limit_s`.

    `connect` returns the store, a `torch.distributed.Store`. It and the store's operations may raise anything, or never return.
    """

    def __init__(self, connect: Callable[[], Any], name: str, limit_s: float = OPERATION_S) -> None:
        self._connect = connect
        self._name = name
        self._limit_s = limit_s

    def become_leader(self, key: str) -> bool:
        """Make this rank the leader, unless there is one; return whether this rank leads."""
        return self._write(f"asks/{key}", self._name) == self._name.encode()

    def lead(self, graph: str) -> bool:
        """Make this rank the one that measures a graph, unless there is one; return whether this rank does."""
        return self._write(f"leads/{graph}", self._name) == self._name.encode()

    def read(self, graph: str) -> Verdict | None:
        """Return the decision for a graph, or None."""
        data = within(self._limit_s, lambda: self._read(f"decided/{graph}"))
        return None if data is None else _decode(data)

    def write(self, graph: str, verdict: Verdict) -> Verdict:
        """Write the decision for a graph unless there is one; return the decision in the register."""
        return _decode(self._write(f"decided/{graph}", json.dumps(dataclasses.asdict(verdict))))

    def count(self, key: str, votes: int) -> int:
        """Add votes to a counter; return the sum. An operation that raises may have been counted."""
        return within(self._limit_s, lambda: int(self._connect().add(key, votes)))

    def write_text(self, key: str, value: str) -> str:
        """Write a value unless there is one; return the value of the register."""
        return _text(self._write(key, value))

    def read_text(self, key: str) -> str | None:
        """Return the value of a register, or None."""
        data = within(self._limit_s, lambda: self._read(key))
        return None if data is None else _text(data)

    def _read(self, key: str) -> bytes | None:
        # `get` alone would wait for the key. Keys are never deleted.
        store = self._connect()
        return bytes(store.get(key)) if store.check([key]) else None

    def _write(self, key: str, value: str) -> bytes:
        # Nothing is expected: the store writes only where there is no value, and returns the one that holds.
        return within(self._limit_s, lambda: bytes(self._connect().compare_set(key, "", value)))


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RegisterError("a register was not understood") from error


def _decode(data: bytes) -> Verdict:
    try:
        return messages.decode(Verdict, data)
    except InvalidMessageError as error:
        raise RegisterError("a register was not understood") from error


def within(limit_s: float, action: Callable[[], _T]) -> _T:
    """Return the result of `action`; raises RegisterError if it raises, or does not return in `limit_s` seconds.

    It runs in a thread of its own. If the process that serves a TCPStore hangs, no operation of the store returns, whatever its time-out
    (torch 2.11 to 2.15).
    """
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    # A daemon thread: an operation that never returns must not keep the process from ending.
    # The prefix of its name tells `workspaces` that it launches nothing.
    thread = threading.Thread(target=run, name="pygraph-registers", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise RegisterError("no thread could be started") from error
    thread.join(limit_s)
    # An operation that comes too late is not taken back: the register may hold its value.
    if results:
        return results[0]
    raise RegisterError(type(errors[0]).__name__ if errors else "no answer in time")
