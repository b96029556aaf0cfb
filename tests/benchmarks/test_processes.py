from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks.processes import Outcome, last_error, run_fresh, run_logged

if TYPE_CHECKING:
    from pathlib import Path


def test_success_has_no_error(tmp_path: Path) -> None:
    outcome = run_fresh(["-c", "print('hello')"], os.environ, 30, folder=tmp_path)
    assert (outcome.error, outcome.output) == (None, "hello\n")


def test_failure_is_the_exception_line(tmp_path: Path) -> None:
    outcome = run_fresh(["-c", "raise ValueError('broken')"], os.environ, 30, folder=tmp_path)
    assert outcome.error == "ValueError: broken"


def test_silent_failure_is_its_exit_code(tmp_path: Path) -> None:
    assert run_fresh(["-c", "raise SystemExit(3)"], os.environ, 30, folder=tmp_path).error == "exit code 3"


@pytest.mark.torch  # it takes seconds
def test_late_process_is_killed_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    child = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = time.monotonic()
    outcome = run_fresh(["-c", parent], os.environ, 2, folder=tmp_path)
    assert time.monotonic() - started < 20
    assert outcome.error == "killed: not done after 2 s"
    assert _is_gone(int(marker.read_text()))


def test_a_process_that_is_not_wanted_any_more_is_killed_at_once(tmp_path: Path) -> None:
    marker, stop = tmp_path / "pid", threading.Event()
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def stop_when_it_runs() -> None:
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.02)
        stop.set()

    threading.Thread(target=stop_when_it_runs).start()
    started = time.monotonic()
    outcome = run_fresh(["-c", code], os.environ, 60, folder=tmp_path, stop=stop)
    assert time.monotonic() - started < 20
    assert outcome.error == "killed: interrupted"
    assert _is_gone(int(marker.read_text()))


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

    assert run_logged(["-c", code], os.environ, 20, log, 1.0) == Outcome(None, "hello\n")


ASKED = """
import signal, sys, time
def end(*_):
    print("put in order", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(60)
"""


@pytest.mark.torch  # it takes seconds
def test_a_late_process_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    outcome = run_logged(["-c", ASKED], os.environ, 1.0, tmp_path / "log", 20)

    assert outcome == Outcome("killed: not done after 1 s", "begun\nput in order\n")


@pytest.mark.torch  # it takes seconds
def test_one_that_does_not_end_when_asked_is_killed_with_its_children(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.run([sys.executable, "-c", {child!r}])
"""
    started = time.monotonic()

    outcome = run_logged(["-c", parent], os.environ, 2, tmp_path / "log", 0.5)

    assert time.monotonic() - started < 20
    assert _is_gone(int(outcome.output))


def _is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_advice_after_an_exception_does_not_hide_it() -> None:
    output = "Traceback ...\ntorch._dynamo.exc.BackendCompilerFailed: x\nRuntimeError: bad\n\nSet TORCH_LOGS=1 for more\n"
    assert last_error(output) == "RuntimeError: bad"
    assert last_error("something\nelse\n\n") == "else"
    assert last_error("\n") is None
