"""What the README says that can be held against the code: settings, commands, files."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pygraphd.cli.commands import application
from pygraphd.client.frontend import settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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


def test_the_files_it_names_are_there() -> None:
    named = re.findall(r"`((?:docs|benchmarks)/[\w./-]+|[A-Z]+\.md)`|\]\(([\w./-]+)\)", README)

    missing = [path for pair in named for path in pair if path and not (ROOT / path).exists()]
    assert named
    assert missing == []
