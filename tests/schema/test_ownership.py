"""Neither another user's files nor another user's daemon are taken for ours, and nothing is waited for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.schema import ownership

if TYPE_CHECKING:
    from pathlib import Path

_AS_OTHER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.setuid(int(sys.argv[2]))
listener.listen()
print(flush=True)
sys.stdin.read()
"""


def test_a_daemon_in_a_folder_of_our_own_is_talked_to(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        with ownership.connect(tmp_path / "s", 10.0) as connection:
            assert ownership.credentials(connection) == (os.getpid(), os.getuid())


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_whoever_listens_in_a_folder_that_others_can_write_to_is_not_believed(
    tmp_path: Path, mode: int
) -> None:
    tmp_path.chmod(mode)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        with pytest.raises(ownership.StrangerError, match=r"others can write to it .*; run: chmod 700"):
            ownership.connect(tmp_path / "s", 10.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("uid", [12345, 3_000_000_000], ids=["small", "beyond 2**31"])
def test_another_users_process_is_not_believed_even_in_a_folder_of_our_own(tmp_path: Path, uid: int) -> None:
    command = [sys.executable, "-c", _AS_OTHER, str(tmp_path / "s"), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs:
        assert theirs.stdout is not None
        assert theirs.stdout.readline()

        with pytest.raises(ownership.StrangerError, match=f"a process of uid {uid} .*; set PYGRAPHD_HOME"):
            ownership.connect(tmp_path / "s", 10.0)


def test_only_regular_files_are_opened_and_no_descriptor_is_left(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    for name in ("pipe", "folder", "link"):
        with pytest.raises(OSError, match=r"not a regular file|Too many levels"):
            ownership.open_regular(tmp_path / name)
    for name, follow in (("file", False), ("link", True)):
        with os.fdopen(ownership.open_regular(tmp_path / name, follow=follow)) as stream:
            assert stream.read() == "text"

    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
