from __future__ import annotations

import os
import socket

from pygraphd.peer import Peer, peer_of, why_refused


def test_the_kernel_names_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_of(ours) == Peer(os.getpid(), os.getuid())


def test_our_user_and_root_are_let_in() -> None:
    assert why_refused(Peer(1, os.geteuid())) is None
    assert why_refused(Peer(1, 0)) is None


def test_everybody_else_is_refused() -> None:
    # 65534 is how a process outside our user namespace is seen.
    for uid in (os.geteuid() + 1, 65534):
        assert why_refused(Peer(1, uid)) == f"uid {uid} may not use the daemon of uid {os.geteuid()}"
