"""Identify the process at the other end of a Unix socket by SO_PEERCRED, and find out whether it still lives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pygraphd.schema.ownership import ROOT, credentials

if TYPE_CHECKING:
    import socket


@dataclass(frozen=True, slots=True)
class Peer:
    """A process, as seen from our user and pid namespaces: uid 65534 and pid 0 stand for "not in them"."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected, or, on a client's side, the one that listens; raises OSError."""
    return Peer(*credentials(connection))


def birth_of(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if there is none, or only its exit code is left.

    Together with the pid it identifies a process, since pids are used again.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; "state" follows it, and "starttime" is 19 fields later (proc(5)).
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def why_refused(peer: Peer) -> str | None:
    """Return why a peer may not use this daemon: it serves its own user and root."""
    # Root can read and change the files anyway.
    if peer.uid in (os.geteuid(), ROOT):
        return None
    return f"uid {peer.uid} may not use the daemon of uid {os.geteuid()}"
