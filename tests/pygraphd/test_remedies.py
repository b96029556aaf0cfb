"""The remedy is a new mode for what is the user's own and closed to him, and another home for what is not his."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.remedies import for_access, unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

_OTHER = 65534
ANOTHER_HOME = "set PYGRAPHD_HOME to a folder of yours"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@contextlib.contextmanager
def _as_somebody() -> Iterator[int]:
    """Be a user who may not read everything."""
    if os.geteuid():
        yield os.geteuid()
        return
    os.seteuid(_OTHER)
    try:
        yield _OTHER
    finally:
        os.seteuid(os.getuid())


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a folder with a file, below one that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        made = Path(name) / "home"
        made.mkdir(mode=0o700)
        (made / "file").touch(mode=0o600)
        yield made
        made.chmod(0o700)


def _give(home: Path, uid: int) -> None:
    if os.geteuid() == 0:
        for each in (home, *home.iterdir()):
            os.chown(each, uid, -1)


@pytest.mark.parametrize("below", ["file", "missing", "spool/missing"])
def test_a_folder_of_ones_own_gets_its_mode_back(home: Path, below: str) -> None:
    _give(home, _OTHER)
    home.chmod(0)
    with _as_somebody():
        assert for_access(home / below) == f"run: chmod 700 {home}"


@pytest.mark.parametrize(("what", "mode"), [("", 700), ("file", 600)])
def test_in_an_open_folder_it_is_the_thing_itself(home: Path, what: str, mode: int) -> None:
    assert for_access(home / what) == f"run: chmod {mode} {home / what}"


@needs_root
def test_what_is_another_users_is_left_to_him(home: Path) -> None:
    with _as_somebody():
        for path in (home, home / "file", home / "missing"):
            assert for_access(path) == ANOTHER_HOME


def test_only_missing_rights_are_mended_so(home: Path) -> None:
    denied, broken = PermissionError(13, "Permission denied"), OSError(5, "Input/output error")
    path = home / "file"
    assert (
        unreadable(path, denied) == f"{path}: cannot be read: Permission denied; run: chmod 600 {home}/file"
    )
    assert unreadable(path, broken) == f"{path}: cannot be read: Input/output error"
