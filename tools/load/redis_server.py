"""A Redis server of a benchmark's own on a Unix socket, and the few commands that are sent to it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Self

from benchmarks.errors import BenchmarkError

if TYPE_CHECKING:
    from pathlib import Path

_START_S = 20.0
_CHUNK = 65536
# Valkey is a fork of Redis with the same options and protocol.
COMMANDS = ("redis-server", "valkey-server")


class RedisServer:
    """A server that runs from `with` to the end of the block, and writes what it is sent to a file each second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.socket = folder / "redis.sock"
        command = next(filter(None, map(shutil.which, COMMANDS)), None)
        if command is None:
            raise BenchmarkError("no redis-server in PATH; install it, as with: apt-get install redis-server")
        self._command = command

    def __enter__(self) -> Self:
        # No TCP port, and no snapshots, for which the server would fork in the midst of a turn. What it is
        # sent goes to a log on the disk, as with the daemon.
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "dir": str(self._folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([self._command, *words], stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + _START_S
            while not self.socket.exists():
                if time.monotonic() > end or self._process.poll() is not None:
                    raise BenchmarkError(f"{self._command} did not start")
                time.sleep(0.02)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    @property
    def version(self) -> str:
        """What it calls itself."""
        done = subprocess.run([self._command, "--version"], capture_output=True, text=True, check=True)
        words = done.stdout.split()
        return " ".join(words[:1] + [word for word in words if word.startswith("v=")])


class RedisClient:
    """A connection to a server; `request` sends commands in one piece and waits for all replies."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def request(self, data: bytes, replies: int) -> bytes:
        """Return the bytes of `replies` replies to what `encoded` made; raises BenchmarkError if one is an error."""
        self._socket.sendall(data)
        answer = b""
        while (end := end_of(answer, replies)) is None:
            piece = self._socket.recv(_CHUNK)
            if not piece:
                raise BenchmarkError("Redis hung up")
            answer += piece
        if end != len(answer):
            raise BenchmarkError("Redis sent more than it was asked for")
        return answer


def encoded(*words: bytes) -> bytes:
    """Return a command as Redis reads it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def end_of(answer: bytes, replies: int) -> int | None:
    """Return where the given number of replies ends; None if that is not here yet."""
    place, left = 0, replies
    while left:
        end = answer.find(b"\r\n", place)
        if end < 0:
            return None
        kind, number = answer[place : place + 1], answer[place + 1 : end]
        if kind == b"-":
            raise BenchmarkError(f"Redis: {number.decode()}")
        place, left = end + 2, left - 1
        if kind == b"*":
            left += int(number)
        # A length of -1 stands for a value that is not there, and no bytes follow.
        elif kind == b"$" and int(number) >= 0:
            place += int(number) + 2
    return place if place <= len(answer) else None
