"""A folder with a daemon of its own, and the means to talk to it; whatever it started is ended, by pid."""

from __future__ import annotations

import contextlib
import hashlib
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

import pytest

from pygraphd.daemon import control
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    RecordRequest,
)
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
        return clean | {"PYGRAPHD_HOME": str(self.path)} | self.variables

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
        with control.connect(self.locations.socket, 20.0) as connected:
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

    def close(self) -> None:
        """End what was started here, in whatever state it is."""
        peer = control.listener(self.locations.socket)
        if peer is not None and peer.pid > 0:
            _kill(peer.pid)
        for process in self.processes:
            _kill(process.pid)
            process.communicate(timeout=60)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "home")
    opened.path.mkdir(mode=0o700)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Return a home whose daemon serves all tests of a file that leave it as they found it."""
    opened = Home(tmp_path_factory.mktemp("shared"))
    opened.path.chmod(0o700)
    try:
        opened.start()
        yield opened
    finally:
        opened.close()


@pytest.fixture
def make_request() -> Callable[..., RecordRequest]:
    """Return a maker of requests that record one graph for each name."""

    def make(*names: str, gpu: str = "NVIDIA H200") -> RecordRequest:
        environment = Environment(gpu, "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")
        return RecordRequest(environment, Origin("here", "0.1.0"), tuple(map(_record, names)))

    return make


def _record(name: str) -> Record:
    graph = Graph(hashlib.sha256(name.encode()).hexdigest(), Kind.FORWARD, 0, 1, 5)
    measured = Measurement(Deployment.KERNELS, 12, 100.0, 1.0, 90.0, 80.0, 0.5)
    return Record(
        graph, Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "it is fastest"), 1), (measured,)
    )
