"""What README and the daemon's manual say that can be held against the code: settings, commands, files."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pygraphd.cli.commands import application
from pygraphd.client.frontend import settings
from pygraphd.config import load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MANUAL = (ROOT / "docs" / "daemon.md").read_text()


def test_the_table_of_settings_has_all_of_them_and_no_other() -> None:
    named = set(re.findall(r"^\| `(PYGRAPH_\w+)` \|", README, re.MULTILINE))

    there = {value for value in vars(settings).values() if str(value).startswith("PYGRAPH_")}
    assert named == there


@pytest.mark.parametrize("line", re.findall(r"^    pygraphd (.+)$", README, re.MULTILINE))
def test_the_commands_it_lists_are_there(line: str) -> None:
    group = ["cache"] if line.startswith("cache ") else []
    for each in line.removeprefix("cache ").split(" | "):
        command = list(itertools.takewhile(re.compile("[a-z][a-z-]*").fullmatch, each.split()))
        shown = CliRunner().invoke(application, [*group, *command, "--help"])

        assert command
        assert shown.exit_code == 0, f"{command}: {shown.output}"
        for flag in re.findall(r"--[a-z-]+", each):
            assert flag in shown.output


def leaves(command: Any, name: str = "") -> dict[str, Any]:
    """Return the commands below a command by what one types, without groups."""
    below = getattr(command, "commands", {})
    found: dict[str, Any] = {} if below else {name: command}
    for word, child in below.items():
        found |= leaves(child, f"{name} {word}".strip())
    return found


def test_the_manual_has_each_command_with_its_options() -> None:
    rows = re.findall(r"^\| `pygraphd ([a-z -]+?)((?: [^a-z `]|`,).*?)?`? \|", MANUAL, re.MULTILINE)
    named = {words.strip(): rest for words, rest in rows}
    commands = leaves(typer.main.get_command(application))

    assert set(named) == set(commands)
    for name, command in commands.items():
        if name == "restart":  # with the options of start
            continue
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert any(flag in named[name] for flag in parameter.opts), (name, parameter.opts)


def test_the_manual_has_each_setting() -> None:
    named = set(re.findall(r"^\| `(\w+)` \| `PYGRAPHD_\w+` \|", MANUAL, re.MULTILINE))

    assert named == set(load_config({}, {}).settings())


def test_the_files_it_names_are_there() -> None:
    named = re.findall(r"`((?:docs|benchmarks)/[\w./-]+|[A-Z]+\.md)`|\]\(([\w./-]+)\)", README)

    missing = [path for pair in named for path in pair if path and not (ROOT / path).exists()]
    assert named
    assert missing == []
