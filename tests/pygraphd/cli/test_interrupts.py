"""An interrupt ends each command without a word, whatever it does at that moment, and be it to import its modules."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

AS_MODULE = ("-m", "pygraphd")
AS_SCRIPT = ("-c", "from pygraphd.cli import main; main()")
"""What an installer makes of the entry point."""
# Sends the signal at the first import of the module that is named.
SITECUSTOMIZE = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Interrupting())
"""
# Where tests run in the background of a script, they and what they start would ignore the signal.
NOT_IGNORING = ("env", "--default-signal=INT")
HANGS_S = 300.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYGRAPH", "XDG_"))}
    return {**clean, "PYTHONPATH": str(tmp_path), "PYGRAPHD_HOME": str(home), "PYGRAPHD_SHIPPED": "0"}


def _outcome(environ: dict[str, str], module: str, *words: str) -> tuple[int, str, str]:
    """Return exit code and output of a command that is interrupted when it begins to import a module."""
    done = subprocess.run(
        [*NOT_IGNORING, sys.executable, *words],
        env={**environ, "INTERRUPTED_AT": module},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "start",
        "start --foreground",
        "stop",
        "restart",
        "status",
        "stats",
        "logs",
        "config show",
        "systemd-units",
        "team init",
        "report",
        "doctor",
        "cache inspect",
        "cache show abc",
        "cache explain abc",
        "cache prune --older-than 1d",
        "cache delete abc",
        "cache clear",
        "cache rederive",
        "cache export -",
        "cache import -",
        "--version",
        "--help",
    ],
)
def test_each_command_ends_without_a_word(environ: dict[str, str], command: str) -> None:
    assert _outcome(environ, "typer", *AS_MODULE, *command.split()) == (130, "", "")


@pytest.mark.parametrize("way", [AS_MODULE, AS_SCRIPT])
@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("pygraphd.cli.output", "status"),  # the first of all
        ("pygraphd.errors", "status"),
        ("pygraphd.cli.commands", "status"),
        ("pygraphd.cli.status", "status"),  # within the command
        ("sqlalchemy", "cache inspect"),
        ("pygraphd.cli.run", "run x.py"),
        ("pygraphd.cli.summary_files", "run x.py"),
        ("pygraphd.daemon.process", "start --foreground"),
        ("pygraphd.daemon.serving", "start --foreground"),  # it holds the lock by then
        ("pygraphd.cli.lifecycle", "start"),
    ],
)
def test_the_moment_makes_no_difference(
    environ: dict[str, str], way: tuple[str, ...], module: str, command: str
) -> None:
    assert _outcome(environ, module, *way, *command.split()) == (130, "", "")


def test_a_program_that_is_run_has_its_own_interrupts(environ: dict[str, str], tmp_path: Path) -> None:
    """And no handler, or the lack of one, that `pygraphd run` has left behind."""
    script = tmp_path / "own.py"
    script.write_text("import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n")
    assert _outcome(environ, "none", *AS_MODULE, "run", str(script)) == (0, "True\n", "")
