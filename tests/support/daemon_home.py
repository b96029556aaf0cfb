"""A folder with a daemon of its own, and the means to talk to it; whatever it started is ended, by pid."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pygraphd.daemon import control
from pygraphd.schema import ownership
from pygraphd.schema.locations import Locations, locate
from tests.support.home_daemons import daemons_of, end_daemons_of, kill
from tests.support.warm_python import commands

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO


COMMAND = [sys.executable, "-m", "pygraphd"]
HANGS_S = 300.0
"""A limit that only ends a test that hangs: a loaded machine takes many seconds for what an idle one does in one."""


@dataclass
class Home:
    """One PYGRAPHD_HOME. `variables` are added to the environment of every process started here."""

    FOR_DAEMONS: ClassVar[frozenset[str]] = frozenset()
    """Variables that Python reads when it starts and that mean something to daemons alone."""

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
        # As users have it, and images for containers often have not: without it each process compiles all of our modules.
        clean.pop("PYTHONDONTWRITEBYTECODE", None)
        own = {"PYGRAPHD_HOME": str(self.path), "PYGRAPHD_SHIPPED": "0"}
        return clean | own | self.variables

    def pygraphd(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end: in a fork, where nothing is set that Python reads when it starts."""
        read = {name for name in self.variables if name.startswith("PYTHON")} - self.FOR_DAEMONS
        if not read and "--foreground" not in words:
            return commands().run(["-m", "pygraphd", *words], self.environ, Path.cwd(), HANGS_S)
        return subprocess.run(
            [*COMMAND, *words], env=self.environ, capture_output=True, text=True, check=False, timeout=HANGS_S
        )

    def pygraphd_soon(self, limit: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end that gives up after a second: `limit` names the constant below `pygraphd` that says when."""
        module, _, name = f"pygraphd.{limit}".rpartition(".")
        code = f"import {module} as it; it.{name} = 1.0; from pygraphd.cli import main; main({list(words)})"
        return subprocess.run(
            [sys.executable, "-c", code],
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANGS_S,
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
            timeout=HANGS_S,
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
            timeout=HANGS_S,
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
        with ownership.connect(self.locations.socket, HANGS_S) as connected:
            connection = http.client.HTTPConnection("pygraphd")
            connection.sock = connected
            connection.request(method, target, body)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = HANGS_S) -> None:
        """Wait for something to come true; the limit is there to end a test that hangs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.02)

    def put_in_spool(self, name: str, body: bytes) -> None:
        """Leave a file in the spool as clients do, whole: a daemon may be looking there at this moment."""
        self.locations.spool.mkdir(mode=0o700, exist_ok=True)
        hidden = self.locations.spool / f".{name}"
        hidden.write_bytes(body)
        hidden.rename(self.locations.spool / name)

    def daemons(self) -> list[int]:
        """Return the pids of all daemons of this home, also of those that do not listen."""
        return daemons_of(self._started_with)

    def close(self) -> None:
        """End what was started here, in whatever state it is."""
        end_daemons_of(self._started_with)
        for process in self.processes:
            if process.poll() is None:
                kill(process.pid)
            process.communicate(timeout=HANGS_S)

    @property
    def _started_with(self) -> Path:
        return Path(self.environ["PYGRAPHD_HOME"] or self.path)
