from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks import processes
from benchmarks.processes import last_error, run_fresh
from tests.support.gone_processes import is_gone
from tests.support.stepped_clock import LateOnce

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
def test_late_process_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "pid"
    child = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(6000)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(processes, "time", LateOnce(lambda: marker.exists() and marker.read_text() != ""))

    outcome = run_fresh(["-c", parent], os.environ, 2, folder=tmp_path)

    assert outcome.error == "killed: not done after 2 s"
    assert is_gone(int(marker.read_text()))


def test_a_process_that_is_asked_to_end_leaves_none_behind_in_sessions_of_their_own(tmp_path: Path) -> None:
    marker, stop = tmp_path / "pid", threading.Event()
    child = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(6000)"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    )

    def stop_when_it_runs() -> None:
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.02)
        stop.set()

    threading.Thread(target=stop_when_it_runs).start()
    run_fresh(["-c", parent], os.environ, 6000, folder=tmp_path, stop=stop, grace_s=60.0)

    assert is_gone(int(marker.read_text()))


def test_a_process_that_is_not_wanted_any_more_is_killed_at_once(tmp_path: Path) -> None:
    marker, stop = tmp_path / "pid", threading.Event()
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(6000)"

    def stop_when_it_runs() -> None:
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.02)
        stop.set()

    threading.Thread(target=stop_when_it_runs).start()
    outcome = run_fresh(["-c", code], os.environ, 6000, folder=tmp_path, stop=stop)
    assert outcome.error == "killed: interrupted"
    assert is_gone(int(marker.read_text()))


def test_advice_after_an_exception_does_not_hide_it() -> None:
    output = "Traceback ...\ntorch._dynamo.exc.BackendCompilerFailed: x\nRuntimeError: bad\n\nSet TORCH_LOGS=1 for more\n"
    assert last_error(output) == "RuntimeError: bad"
    assert last_error("something\nelse\n\n") == "else"
    assert last_error("\n") is None
