"""Runs a command of `pygraphd` in this process, in folders of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import main
from pygraphd.schema.locations import Locations, locate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Locations:
    """Return the locations of a home that is empty."""
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    return locate()


def pygraphd(*words: str) -> int:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert isinstance(caught.value.code, int)
    return int(caught.value.code)
