"""A user's program run in a process of its own, beside a daemon and a home of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygraphd.schema.locations import Locations, locate
from tests.support.home_daemons import daemons_of, end_daemons_of
from tests.support.patience import patient as with_patience
from tests.support.warm_python import WarmPython

PROGRAM = Path(__file__).parents[1] / "e2e" / "programs" / "program.py"
RUN_TIMEOUT_S = 600
COMMAND_TIMEOUT_S = 300
_OURS = ("PYGRAPH", "_PYGRAPH", "TORCHINDUCTOR", "TORCH_LOGS", "TORCH_DEVICE_BACKEND_AUTOLOAD")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run of a program ended."""

    code: int
    stdout: str
    stderr: str
    summary: dict[str, Any] | None

    @property
    def counts(self) -> dict[str, Any]:
        """The summary, which must be there."""
        assert self.summary is not None, f"no summary was written\n{self.stderr}"
        return self.summary


@dataclass(slots=True)
class Sandbox:
    """A home for one daemon and its cache; `inductor` is where compiled code is kept between runs."""

    home: Path
    inductor: Path
    python: WarmPython
    _runs: int = 0

    @property
    def locations(self) -> Locations:
        """Where socket and database of this home lie."""
        return locate({"PYGRAPHD_HOME": str(self.home)})

    def environment(self, **variables: str) -> dict[str, str]:
        """Return this process's environment without any setting of ours, plus this sandbox's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        return {
            **kept,
            "PYGRAPHD_HOME": str(self.home),
            "PYGRAPHD_AUTOSTART": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(self.inductor),
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # see tests/conftest.py
            **variables,
        }

    def run(
        self,
        *arguments: str,
        command: tuple[str, ...] = (),
        hook: bool = True,
        patient: bool = True,
        **variables: str,
    ) -> Outcome:
        """Run the program, under `PYGRAPH=1` if `hook`; `command` stands before its path, and starts a new Python.

        It waits for a daemon as long as that takes, unless it is not `patient`.
        """
        self._runs += 1
        path = self.home / f"summary-{self._runs}.json"
        if hook:
            variables = {"PYGRAPH": "1", **variables}
        environ = self.environment(**{"PYGRAPH_SUMMARY": str(path), **variables})
        if patient:
            environ = with_patience(environ)
        if command:
            finished = subprocess.run(
                [*command, str(PROGRAM), *arguments],
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT_S,
                check=False,
            )
        else:
            finished = self.python.run([PROGRAM, *arguments], environ, Path.cwd(), RUN_TIMEOUT_S)
        summary = json.loads(path.read_text()) if path.exists() else None
        return Outcome(finished.returncode, finished.stdout, finished.stderr, summary)

    def pygraphd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one `pygraphd` command."""
        return subprocess.run(
            [sys.executable, "-m", "pygraphd", *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def start_daemon(self) -> int:
        """Start the daemon and return its process id."""
        started = self.pygraphd("start")
        assert started.returncode == 0, started.stderr
        (pid,) = daemons_of(self.home)
        return pid

    def daemon_pid(self) -> int | None:
        """Return the process id that `status` gives."""
        status = json.loads(self.pygraphd("status", "--json").stdout)
        pid: int | None = status["pid"] if status["running"] else None
        return pid

    def stop_daemon(self) -> None:
        """Stop the daemon, which must be running."""
        stopped = self.pygraphd("stop")
        assert stopped.returncode == 0, stopped.stderr

    def close(self) -> None:
        """End every daemon of this home, whoever started it and in whatever state it is, and remove the home."""
        end_daemons_of(self.home)
        shutil.rmtree(self.home, ignore_errors=True)
