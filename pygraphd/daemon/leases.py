"""Grant leases: of many processes that meet an unknown graph at once, one measures it. In memory, on the event loop's thread.

A lease ends when a final decision, or any of its holder's, is recorded, when its time is over, or when its holder is dead. A restarted daemon has none:
then two processes may measure one graph, which costs time and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.daemon.peer import birth_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pygraphd.daemon.peer import Peer

MAX_LEASES = 100_000
"""Beyond this no new ones are kept: everybody may measure."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process: the name in its requests, and its pid and time of start as the kernel has them. `pid` 0: not in our pid namespace, so only time ends its leases."""

    name: str
    pid: int
    birth: int | None

    @classmethod
    def of(cls, name: str, peer: Peer) -> Holder:
        """Return the holder that a peer of our socket is."""
        return cls(name, peer.pid, birth_of(peer.pid) if peer.pid else None)

    def is_dead(self) -> bool:
        """Return whether the process is known to have ended."""
        return self.pid != 0 and birth_of(self.pid) != self.birth


@dataclass(frozen=True, slots=True)
class _Lease:
    holder: Holder
    expires: float


class Leases:
    """All leases of a daemon, each for `seconds` on the clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        # Monotonic by default: a clock that is set would end all leases, or prolong them.
        self._clock = clock
        self._leases: dict[tuple[str, str], _Lease] = {}

    def __len__(self) -> int:
        """Return the number of leases, expired ones that were not removed yet included."""
        return len(self._leases)

    def ask(self, environment: str, graphs: Sequence[str], holder: Holder) -> tuple[str, ...]:
        """Return the graphs that `holder` may measure from now on. Leases that it holds are prolonged."""
        self._drop_old()
        granted = tuple(graph for graph in graphs if self._is_free((environment, graph), holder))
        if len(self._leases) < MAX_LEASES:
            lease = _Lease(holder, self._clock() + self.seconds)
            for graph in granted:
                # Out first, so that they stay in the order in which they expire.
                self._leases.pop((environment, graph), None)
                self._leases[environment, graph] = lease
        return granted

    def recorded(self, environment: str, final: Iterable[str], others: Iterable[str], peer: Peer) -> None:
        """End the leases of graphs in `final`, and those of graphs in `others` that `peer` holds."""
        for graph in final:
            self._leases.pop((environment, graph), None)
        for graph in others:
            lease = self._leases.get((environment, graph))
            # Pid 0 stands for all processes of other namespaces: one must not end the lease of another.
            if lease is not None and lease.holder.pid == peer.pid != 0:
                del self._leases[environment, graph]

    def is_held(self, environment: str, graph: str) -> bool:
        """Return whether a process may hold the lease of a graph; one that has died without an `ask` since counts."""
        lease = self._leases.get((environment, graph))
        return lease is not None and lease.expires > self._clock()

    def by_pid(self) -> dict[int, list[str]]:
        """Return the graphs that each process may measure now."""
        now = self._clock()
        held: dict[int, list[str]] = {}
        for (_, graph), lease in self._leases.items():
            if lease.expires <= now:
                continue
            held.setdefault(lease.holder.pid, []).append(graph)
        return held

    def _is_free(self, key: tuple[str, str], holder: Holder) -> bool:
        lease = self._leases.get(key)
        # One that has expired may stand behind one that has not, if the daemon's settings have shortened leases since.
        if lease is None or lease.expires <= self._clock():
            return True
        # By name, as pid 0 is that of all processes of other namespaces.
        return lease.holder.name == holder.name or lease.holder.is_dead()

    def _drop_old(self) -> None:
        now = self._clock()
        while self._leases:
            key, lease = next(iter(self._leases.items()))
            if lease.expires > now:
                return
            del self._leases[key]
