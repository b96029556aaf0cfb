"""Who is at the other end of a Unix socket, by the kernel's word (SO_PEERCRED)."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")
_ROOT = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A process, as seen from our user and pid namespaces: uid 65534 and pid 0 stand for "not in them"."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected, or, on a client's side, the one that listens; raises OSError."""
    payload = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(payload)
    return Peer(pid, uid)


def why_refused(peer: Peer) -> str | None:
    """Return why a peer may not use this daemon: it serves its own user and root."""
    if peer.uid in (os.geteuid(), _ROOT):
        return None
    return f"uid {peer.uid} may not use the daemon of uid {os.geteuid()}"
