"""Each command says of a home that it may not look into what to do, and this is something that the user can do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.cli_command import pygraphd

if TYPE_CHECKING:
    from collections.abc import Iterator

_OTHER = 65534
WARMING = ("stats", "cache inspect", "report last", "logs", "stop", "cache clear")
"""They import what the commands need, which another user may not be able to read."""
COMMANDS = {
    "stats": 1,
    "stats --zero": 1,
    "cache inspect": 1,
    "cache clear": 1,
    "report last": 1,
    "logs": 1,
    "start": 2,
    "stop": 1,
}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        made = Path(name) / "home"
        made.mkdir(mode=0o700)
        monkeypatch.setenv("PYGRAPHD_HOME", str(made))
        yield made
        made.chmod(0o700)


@pytest.mark.parametrize(
    "whose",
    [
        "own",
        pytest.param(
            "another's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another")
        ),
    ],
)
def test_each_command_says_what_to_do(home: Path, capsys: pytest.CaptureFixture[str], whose: str) -> None:
    for command in WARMING:
        pygraphd(*command.split())
    capsys.readouterr()
    remedy = "set PYGRAPHD_HOME to a folder of yours"
    if whose == "own":
        remedy = f"run: chmod 700 {home}"
        home.chmod(0)
        if os.geteuid() == 0:
            os.chown(home, _OTHER, -1)
    found = {}
    if os.getuid() == 0:
        os.seteuid(_OTHER)
    try:
        for command in COMMANDS:
            found[command] = (pygraphd(*command.split()), capsys.readouterr())
    finally:
        os.seteuid(os.getuid())

    for command, (code, printed) in found.items():
        assert (code, printed.out) == (COMMANDS[command], ""), command
        assert printed.err.startswith(f"pygraphd: {home}/"), command
        assert printed.err.endswith(f"Permission denied; {remedy}\n"), command
        assert printed.err.count("\n") == 1, command
