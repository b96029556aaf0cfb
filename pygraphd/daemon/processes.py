"""The processes that a daemon serves, and what each measures and waits for. In memory, on the event loop's thread.

A process is known from its first lookup, lease or record until it ends. A process of another pid namespace has pid 0, and all of these
are one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraphd.daemon.peer import birth_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pygraphd.daemon.leases import Leases
    from pygraphd.daemon.peer import Peer

MAX_PROCESSES = 1024
"""Processes that are remembered; beyond that those go first that have asked for nothing for longest."""
MAX_LISTED = 64
"""Processes in a description, the latest to ask first: each takes some reads of /proc."""
MAX_NAMED_GRAPHS = 16
"""Graphs by name in a description, of each process; the numbers are of all."""
_SAME_S = 10.0
"""Seconds within which a pid is taken to be of the same process without a look at /proc."""
_MAX_PROGRAM = 80


@dataclass(slots=True)
class _Process:
    birth: int | None
    asked_at: float
    requests: int = 0
    waits: set[tuple[str, str]] = field(default_factory=set)


class Processes:
    """The processes that asked for something, with what `leases` says of them."""

    def __init__(self, leases: Leases, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases = leases
        self._clock = clock
        self._known: dict[int, _Process] = {}

    def note(self, peer: Peer) -> None:
        """Note a request of a process."""
        now, known = self._clock(), self._known.pop(peer.pid, None)
        if known is None or now - known.asked_at > _SAME_S:
            birth = birth_of(peer.pid) if peer.pid else None
            if known is None or known.birth != birth:
                known = _Process(birth, now)
        known.asked_at = now
        known.requests += 1
        self._known[peer.pid] = known  # last, so that they stay in the order in which they asked
        if len(self._known) > MAX_PROCESSES:
            del self._known[next(iter(self._known))]

    def note_lease(self, peer: Peer, environment: str, asked: Iterable[str], granted: Iterable[str]) -> None:
        """Note which of some graphs a process may measure; it waits for the others."""
        if (known := self._known.get(peer.pid)) is not None:
            known.waits.difference_update((environment, graph) for graph in granted)
            # Another's answer ends a wait unseen here: the set would grow until somebody looks at it.
            if len(known.waits) > MAX_PROCESSES:
                self._forget_answered(known)
            known.waits.update((environment, graph) for graph in {*asked}.difference(granted))

    def describe(self) -> tuple[list[dict[str, Any]], int]:
        """Return the processes that live, the latest to ask first, and the number of those left out. Forgets those that have ended."""
        self._known = {pid: each for pid, each in self._known.items() if not self._has_ended(pid, each)}
        measured = self._leases.by_pid()
        latest = [*reversed(self._known)][:MAX_LISTED]
        return [self._describe(pid, measured.get(pid, [])) for pid in latest], len(self._known) - len(latest)

    def _describe(self, pid: int, measures: list[str]) -> dict[str, Any]:
        known = self._known[pid]
        self._forget_answered(known)
        waits = sorted({graph for _, graph in known.waits}.difference(measures))
        return {
            "pid": pid,
            "program": program_of(pid),
            "requests": known.requests,
            "idle_s": round(self._clock() - known.asked_at, 1),
            "measuring": len(measures),
            "measures": measures[:MAX_NAMED_GRAPHS],
            "waiting": len(waits),
            "waits_for": waits[:MAX_NAMED_GRAPHS],
        }

    def _forget_answered(self, known: _Process) -> None:
        known.waits = {key for key in known.waits if self._leases.is_held(*key)}

    @staticmethod
    def _has_ended(pid: int, known: _Process) -> bool:
        return pid != 0 and birth_of(pid) != known.birth


def program_of(pid: int) -> str:
    """Return the program and the script of a process, without its arguments; empty if it cannot be told."""
    try:
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes()[:4096].decode(errors="replace").split("\0")
            if pid
            else []
        )
    except OSError:
        return ""
    if not words:
        return ""
    # No arguments, which may hold secrets. A control character would have `status` refuse the whole list.
    shown = [Path(words[0]).name, *_script(words[1:])]
    return _shortened("".join(c if c.isprintable() else "?" for c in " ".join(shown)).strip())


def _shortened(text: str) -> str:
    """Return a text of at most `_MAX_PROGRAM` characters: of a long one the beginning, and the end, where a script's name is."""
    beginning = 16
    if len(text) <= _MAX_PROGRAM:
        return text
    return f"{text[:beginning]}...{text[beginning + 3 - _MAX_PROGRAM :]}"


def _script(words: list[str]) -> list[str]:
    """Return what an interpreter runs: the first word that is no option, or the module of `-m`."""
    for number, word in enumerate(words):
        if word == "-m":
            return words[number : number + 2]
        if word == "-c":
            return ["-c ..."]  # code, which may hold anything
        if not word.startswith("-"):
            return [word]
    return []
