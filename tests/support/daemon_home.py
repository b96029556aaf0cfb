"""A folder with a daemon of its own, and the means to talk to it; whatever it started is ended, by pid."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraphd.daemon import control
from pygraphd.schema import ownership
from pygraphd.schema.locations import Locations, locate

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO


COMMAND = [sys.executable, "-m", "pygraphd"]


@dataclass
class Home:
    """One PYGRAPHD_HOME. `variables` are added to the environment of every process started here."""

    path: Path
    variables: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def locations(self) -> Locations:
        return locate(self.environ)

    @property
    def environ(self) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYGRAPH", "XDG_"))
        }
        own = {"PYGRAPHD_HOME": str(self.path), "PYGRAPHD_SHIPPED": "0"}
        return clean | own | self.variables

    def pygraphd(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*COMMAND, *words], env=self.environ, capture_output=True, text=True, check=False, timeout=60
        )

    def pygraphd_fed(self, text: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end that reads `text`."""
        return subprocess.run(
            [*COMMAND, *words],
            env=self.environ,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def pygraphd_into(self, stream: TextIO, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end that writes to `stream`."""
        return subprocess.run(
            [*COMMAND, *words],
            env=self.environ,
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )

    def spawn(self, *prefix: str) -> subprocess.Popen[bytes]:
        """Start a daemon in the foreground of a new process, as a client's hook does."""
        process = subprocess.Popen(
            [*prefix, *COMMAND, "start", "--foreground"],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        self.processes.append(process)
        return process

    def start(self) -> int:
        """Start a daemon and return its pid as soon as it answers."""
        process = self.spawn()
        self.wait_until(lambda: control.ping(self.locations.socket) is not None)
        return process.pid

    def status(self) -> dict[str, Any]:
        """Return what `status --json` says."""
        value = json.loads(self.pygraphd("status", "--json").stdout)
        assert isinstance(value, dict)
        return value

    def ask(self, method: str, target: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        """Send one request; returns status and JSON."""
        with ownership.connect(self.locations.socket, 20.0) as connected:
            connection = http.client.HTTPConnection("pygraphd")
            connection.sock = connected
            connection.request(method, target, body)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for something to come true; the limit is there to end a test that hangs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.02)

    def daemons(self) -> list[int]:
        """Return the pids of all daemons of this home, also of those that do not listen."""
        own = f"={self.environ['PYGRAPHD_HOME'] or self.path}\0".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_daemon = b"\0start\0" in (folder / "cmdline").read_bytes()
                if is_daemon and own in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        """End what was started here, in whatever state it is."""
        for pid in self.daemons():
            _kill(pid)
        for process in self.processes:
            _kill(process.pid)
            process.communicate(timeout=60)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
