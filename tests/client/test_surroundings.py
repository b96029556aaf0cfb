"""A program that is well without PyGraph is well with it, in surroundings that nobody wishes for.

Every case runs a program in a process of its own, which first compiles on a thread where that may matter, and is held to the exit code and the
output that it has without PyGraph.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.warm_python import WarmPython

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LIMIT_S = 600
TREES = "torch._inductor.cudagraph_trees"
UNBUFFERED = "PYTHONUNBUFFERED"

# Matrix products alone: Inductor calls the library for them, and no C++ compiler takes its seconds.
PROGRAM = """
import atexit, os, signal, sys, threading, warnings
{before}
import torch

def work():
    model = torch.compile(lambda x, y: x @ y @ y)
    global answer
    answer = model(torch.ones(4, 4), torch.ones(4, 4)).sum().item()

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(answer)
{after}
"""
ANSWER = "256.0\n"

# What is said when torch is imported, and whether it can be at exit, asks for no compiling, which takes most of the time.
WITHOUT_COMPILING = """
import atexit, os, signal, sys, threading, warnings
{before}
import torch

print((torch.ones(4, 4) @ torch.ones(4, 4) @ torch.ones(4, 4)).sum().item())
{after}
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and its summary if it left one."""

    code: int
    out: str
    err: str
    summary: dict[str, Any] | None


Run = Any


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def python(warm_python: WarmPython) -> Iterator[WarmPython]:
    """Return what runs programs whose output is buffered, as it is for most users.

    Where this process's is not, the one for all tests would start a Python for each program.
    """
    if UNBUFFERED not in os.environ:
        yield warm_python
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(UNBUFFERED)
        started = WarmPython()
        yield started
        started.close()


def run_anew(
    flags: tuple[str, ...],
    program: str,
    environ: dict[str, str],
    folder: Path,
    stderr: int,
    prepare: Callable[[], None] | None,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `WarmPython` does, in a Python that starts as the case asks for."""
    return subprocess.run(
        [sys.executable, *flags, "-c", program],
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=prepare,
    )


@pytest.fixture
def run(tmp_path: Path, inductor: Path, python: WarmPython) -> Run:
    def run_once(
        *,
        before: str = "",
        after: str = "",
        flags: tuple[str, ...] = (),
        prepare: Callable[[], None] | None = None,
        stderr: int = subprocess.PIPE,
        hook: bool = True,
        compiles: bool = True,
        **environ: str | None,
    ) -> Outcome:
        program = (PROGRAM if compiles else WITHOUT_COMPILING).format(
            before=textwrap.dedent(before), after=textwrap.dedent(after)
        )
        summary = tmp_path / "summary.json"
        variables = {
            **{name: value for name, value in os.environ.items() if "PYGRAPH" not in name},
            "PYGRAPHD_HOME": str(tmp_path / "home"),
            "PYGRAPHD_AUTOSTART": "0",
            "PYGRAPH_SUMMARY": str(summary),
            "TORCHINDUCTOR_CACHE_DIR": str(inductor),
            **({"PYGRAPH": "1"} if hook else {}),
            **environ,
        }
        kept = {name: value for name, value in variables.items() if value is not None}
        if not flags and prepare is None:
            done = python.run(["-c", program], kept, tmp_path, LIMIT_S, stderr)
        else:
            done = run_anew(flags, program, kept, tmp_path, stderr, prepare)
        left = json.loads(summary.read_text()) if summary.exists() else None
        return Outcome(done.returncode, done.stdout, done.stderr or "", left)

    return run_once


def assert_well(outcome: Outcome) -> None:
    assert (outcome.code, outcome.out) == (0, ANSWER), outcome.err
    assert "Traceback" not in outcome.err


def test_a_first_compile_on_a_thread(run: Run) -> None:
    """What stays in a thread's own storage until the interpreter has gone aborts it: PyTorch's trees leave such things."""
    outcome = run(after=f"print({TREES!r} in sys.modules)")

    assert (outcome.code, outcome.out) == (0, f"{ANSWER}False\n"), outcome.err
    assert outcome.summary["graphs"] == 1
    assert outcome.summary["failures"] == {
        "daemon: not started: PYGRAPHD_AUTOSTART=0": 1,
        "daemon: no daemon": 2,
    }


def test_trees_that_were_imported_before(run: Run) -> None:
    outcome = run(after="print('on')", before=f"import {TREES}")

    assert (outcome.code, outcome.out) == (0, f"{ANSWER}on\n"), outcome.err
    assert outcome.summary["graphs"] == 1


# A message when Inductor is imported, and one at exit.
TALKATIVE = {"PYGRAPH_SIZES": "many", "PYGRAPH_SUMMARY": "/nowhere/summary.json"}


def test_messages_are_said(run: Run) -> None:
    outcome = run(**TALKATIVE)

    assert_well(outcome)
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["pygraph"] * 2


NO_HOOK = "sys.modules['pygraphd.client.hook'] = None"  # so that the entry point has something to say


@pytest.mark.parametrize("before", ["", NO_HOOK], ids=["hook", "entry point"])
@pytest.mark.parametrize("place", ["closed", "full", "broken"])
def test_messages_that_nobody_can_hear(run: Run, place: str, before: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        stderr = {"closed": subprocess.DEVNULL, "full": full, "broken": writer}[place]
        outcome = run(
            before=before,
            stderr=stderr,
            prepare=(lambda: os.close(2)) if place == "closed" else None,
            compiles=not before,
            **TALKATIVE,
        )
    finally:
        os.close(writer)
        os.close(full)

    assert_well(outcome)


def test_an_entry_point_that_fails_says_so(run: Run) -> None:
    outcome = run(before=NO_HOOK, compiles=False)

    assert_well(outcome)
    assert outcome.err.startswith("pygraph: not enabled: ")


def test_the_strictest_interpreter(run: Run) -> None:
    outcome = run(flags=("-I", "-X", "dev", "-bb"))

    assert_well(outcome)
    assert outcome.summary["graphs"] == 1
    assert "pygraph" not in outcome.err


def test_warnings_that_are_errors(run: Run) -> None:
    """From the moment on when PyTorch has been imported, which they would end."""
    strict = "import torch._inductor.compile_fx; warnings.simplefilter('error')"
    plain = run(before=strict, hook=False)
    outcome = run(before=strict)

    assert (outcome.code, outcome.out) == (plain.code, plain.out), outcome.err
    assert outcome.err == plain.err


def test_variables_that_are_empty(run: Run) -> None:
    names = (
        "PYGRAPH_SUMMARY", "PYGRAPHD_HOME", "PYGRAPH_DISABLE", "PYGRAPH_READONLY", "PYGRAPH_TRUST", "PYGRAPH_REFRESH",
        "PYGRAPH_RELOCATE", "PYGRAPH_PLACEMENT", "PYGRAPH_COLLECTIVES", "PYGRAPH_SIZES", "PYGRAPH_SIZE_CALLS",
        "PYGRAPH_RECHECK_S", "PYGRAPH_MEMORY", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HOME", "USER", "CI", "PATH",
    )  # fmt: skip
    outcome = run(
        PYGRAPHD_AUTOSTART="0",
        PYGRAPH_READONLY="1",
        **{name: "" for name in names if name != "PYGRAPH_READONLY"},
    )

    assert_well(outcome)
    assert outcome.err == ""


@pytest.mark.parametrize("home", ["/proc/nothing", "/dev/null", "x" * 3000])
def test_homes_that_are_none(run: Run, home: str) -> None:
    outcome = run(PYGRAPHD_HOME=home)

    assert_well(outcome)
    assert outcome.summary["graphs"] == 1
    assert outcome.summary["failures"]


def test_a_folder_that_is_gone(run: Run) -> None:
    """PyTorch alone does not start in such a one, but a program may come to be in it."""
    after = """
    os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
    import pygraphd
    pygraphd.enable()
    print(torch.compile(lambda x: x @ x)(torch.ones(2, 2)).sum().item())
    """
    outcome = run(after=after, hook=False, PYGRAPH_SUMMARY="s.json", PYGRAPHD_HOME="home", HOME=None)

    assert (outcome.code, outcome.out) == (0, f"{ANSWER}8.0\n"), outcome.err
    assert "Traceback" not in outcome.err


def test_no_descriptors_left(run: Run) -> None:
    """From the first call on: what comes then is recording, looking up for backwards, messages and the summary."""
    outcome = run(
        after="""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept = []
        try:
            while True:
                kept.append(os.dup(0))
        except OSError:
            pass
        """
    )

    assert_well(outcome)
    assert outcome.summary is None
    assert outcome.err.startswith("pygraph: the summary is not complete")


def test_no_process_can_be_started(run: Run) -> None:
    refuse = """
    import subprocess
    class Refused(subprocess.Popen):
        def __init__(self, command, *arguments, **options):
            if "pygraphd" in str(command):
                raise BlockingIOError("no process left")
            super().__init__(command, *arguments, **options)
    subprocess.Popen = Refused
    """
    outcome = run(before=refuse, PYGRAPHD_AUTOSTART="1", CI=None)

    assert_well(outcome)
    assert outcome.summary["failures"].get("daemon: not started: BlockingIOError: no process left") == 1


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ("os._exit(3)", 3),
        ("sys.exit(4)", 4),
        ("raise SystemExit('no')", 1),
        ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        # A shell has what it runs in the background ignore it.
        (
            "sys.stdout.flush(); signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(60)",
            -signal.SIGINT,
        ),
        ("sys.stdout.flush(); pid = os.fork()\nif not pid: sys.exit(5)\nsys.exit(os.waitpid(pid, 0)[1] >> 8)", 5),
        ("sys.stdout.flush(); pid = os.fork()\nif not pid: os._exit(6)\nsys.exit(os.waitpid(pid, 0)[1] >> 8)", 6),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", 0),
        ("os.close(2)", 0),
        ("sys.stderr.close()", 0),
        ("sys.stderr = None", 0),
    ],
    ids=range(11),
)  # fmt: skip
def test_ways_to_end(run: Run, after: str, code: int) -> None:
    """With something to say at exit."""
    if "os._exit(3)" in after:
        after = f"sys.stdout.flush(); {after}"

    outcome = run(after=after, compiles="os.close" not in after and "sys.stderr" not in after, **TALKATIVE)

    assert (outcome.code, outcome.out) == (code, ANSWER), outcome.err


def test_calls_after_the_session_has_ended(run: Run) -> None:
    """What was registered before `import torch` runs after what PyGraph has registered."""
    late = "atexit.register(lambda: print(late(torch.ones(2, 2)).sum().item()))"
    after = "late = torch.compile(lambda x: x @ x); late(torch.ones(2, 2))"

    outcome = run(before=late, after=after)

    assert (outcome.code, outcome.out) == (0, f"{ANSWER}8.0\n"), outcome.err
    assert "Traceback" not in outcome.err


def test_the_summary_on_standard_output(run: Run) -> None:
    outcome = run(PYGRAPH_SUMMARY="/dev/stdout")

    assert outcome.code == 0
    assert outcome.out.startswith(ANSWER)
    assert json.loads(outcome.out.removeprefix(ANSWER))["graphs"] == 1
    assert Path("/dev/stdout").is_symlink()
