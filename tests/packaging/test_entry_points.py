"""What the installed distribution offers: two entry points for torch, one program, and help for each of its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any

import pytest
import typer

import pygraphd
from pygraphd.cli.commands import application
from tests.support import warm_python

PROGRAM = Path(sys.executable).with_name("pygraphd")


def entry_point(group: str) -> EntryPoint:
    (found,) = entry_points(group=group, name="pygraph")
    return found


@pytest.mark.parametrize("group", ["torch.backends", "torch_dynamo_backends"])
def test_entry_point_resolves(group: str) -> None:
    assert callable(entry_point(group).load())


def test_version_is_said_the_same_everywhere() -> None:
    said = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True, timeout=60)

    assert said.stdout == f"pygraphd {pygraphd.__version__}\n"
    assert version("pygraphd") == pygraphd.__version__


def commands(command: Any, name: str = "pygraphd") -> dict[str, Any]:
    """Return a command and all below it by what one types."""
    found = {name: command}
    for word, child in getattr(command, "commands", {}).items():
        found |= commands(child, f"{name} {word}")
    return found


COMMANDS = commands(typer.main.get_command(application))


def test_commands_are_the_documented_ones() -> None:
    assert set(COMMANDS) == {
        "pygraphd",
        *(f"pygraphd {word}" for word in ("start", "stop", "restart", "status", "stats", "logs", "systemd-units")),
        *(f"pygraphd {word}" for word in ("run", "report", "doctor", "cache", "config", "config show")),
        *(f"pygraphd {word}" for word in ("team", "team init")),
        *(
            f"pygraphd cache {word}"
            for word in (
                "inspect", "show", "explain", "prune", "rederive", "export", "import", "delete", "clear",
            )
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_command_and_its_options_have_help(name: str) -> None:
    command = COMMANDS[name]

    assert command.help
    for parameter in command.params:
        assert parameter.help, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed_and_explains_the_command(name: str) -> None:
    words = name.split()[1:]

    said = warm_python.commands().run([PROGRAM, *words, "-h"], os.environ, Path.cwd(), 60)

    assert said.returncode == 0
    assert f"Usage: {name}" in said.stdout
    assert said.stderr == ""
