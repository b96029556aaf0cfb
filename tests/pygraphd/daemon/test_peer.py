from __future__ import annotations

import os
import socket
import subprocess
import sys

from pygraphd.daemon.peer import Peer, birth_of, peer_of, why_refused


def test_the_kernel_names_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_of(ours) == Peer(os.getpid(), os.getuid())


def test_a_process_that_has_ended_has_no_birth_though_nobody_has_asked_for_its_exit_code() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        born = birth_of(process.pid)
        assert born is not None
        assert birth_of(process.pid) == born
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert birth_of(process.pid) is None
    finally:
        process.communicate()
    assert birth_of(process.pid) is None


def test_our_user_and_root_are_let_in() -> None:
    assert why_refused(Peer(1, os.geteuid())) is None
    assert why_refused(Peer(1, 0)) is None


def test_everybody_else_is_refused() -> None:
    # 65534 is how a process outside our user namespace is seen.
    for uid in (os.geteuid() + 1, 65534):
        assert why_refused(Peer(1, uid)) == f"uid {uid} may not use the daemon of uid {os.geteuid()}"
