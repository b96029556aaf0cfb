from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from pygraphd import folders
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from pathlib import Path

_OTHER_UID = 12345


def test_makes_what_is_missing_for_us_alone(tmp_path: Path) -> None:
    locations = locate(
        {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "XDG_CACHE_HOME": str(tmp_path / "a" / "b")}
    )
    folders.prepare_runtime(locations)
    assert folders.prepare_cache(locations) is None
    for folder in (locations.runtime, locations.cache, locations.spool):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_accepts_what_others_can_only_read(tmp_path: Path) -> None:
    # The socket in it is 0600, and peers are asked who they are.
    tmp_path.chmod(0o755)
    folders.make_private(tmp_path)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, 0o720])
def test_refuses_what_others_can_write_to(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(
        CommandError, match=rf"others can write to it \(mode {mode:o}\); run: chmod 700 {tmp_path}"
    ):
        folders.make_private(tmp_path)


def test_refuses_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(CommandError, match="is a symbolic link"):
        folders.make_private(tmp_path / "link")


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="is not a folder"):
        folders.make_private(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_refuses_somebody_elses(tmp_path: Path) -> None:
    os.chown(tmp_path, _OTHER_UID, -1)
    with pytest.raises(CommandError, match=f"belongs to uid {_OTHER_UID}, not to you"):
        folders.make_private(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write to what is another's")
def test_nothing_is_made_in_a_folder_that_is_refused(tmp_path: Path) -> None:
    """Its owner could not use what root makes there, and would have no daemon any more."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, _OTHER_UID, -1)
    with pytest.raises(UsageError, match=f"belongs to uid {_OTHER_UID}"):
        folders.prepare_cache(locate({"PYGRAPHD_HOME": str(home)}))
    assert list(home.iterdir()) == []


def test_says_what_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match=r"cannot be made: .*; set PYGRAPHD_HOME"):
        folders.make_private(tmp_path / "file" / "below")
    locations = locate({"PYGRAPHD_HOME": str(tmp_path / "file" / "below")})
    assert "cannot be made" in str(folders.prepare_cache(locations))
