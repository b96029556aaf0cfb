from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks import processes
from benchmarks.processes import Outcome
from tests.support.gone_processes import is_gone
from tests.support.stepped_clock import LateOnce
from tools.lab.processes import run_logged

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_printed_is_in_the_log_as_it_comes(tmp_path: Path) -> None:
    log, seen = tmp_path / "log", tmp_path / "seen"
    code = f"""
import pathlib, time
print("hello", flush=True)
while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.02)
"""

    def look() -> None:
        while not (log.exists() and log.read_text() == "hello\n"):
            time.sleep(0.02)
        seen.touch()

    threading.Thread(target=look, daemon=True).start()

    assert run_logged(["-c", code], os.environ, 600, log, 1.0) == Outcome(None, "hello\n")


def has_said(log: Path) -> bool:
    """Return whether there is a line in a log."""
    return log.exists() and log.read_text().endswith("\n")


ASKED = """
import signal, sys, time
def end(*_):
    print("put in order", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(6000)
"""


@pytest.mark.torch  # it takes seconds
def test_a_late_process_is_asked_to_end_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(processes, "time", LateOnce(lambda: has_said(log)))

    outcome = run_logged(["-c", ASKED], os.environ, 1.0, log, 600)

    assert outcome == Outcome("killed: not done after 1 s", "begun\nput in order\n")


@pytest.mark.torch  # it takes seconds
def test_one_that_does_not_end_when_asked_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(processes, "time", LateOnce(lambda: has_said(log)))
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(6000)"
    parent = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.run([sys.executable, "-c", {child!r}])
"""

    outcome = run_logged(["-c", parent], os.environ, 2, log, 0.5)

    assert is_gone(int(outcome.output))
