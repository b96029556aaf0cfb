"""Refuses folders that another user has put where everybody may write, such as /tmp."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def refuse_planted(folder: Path) -> None:
    """Raise PermissionError if a folder lies where everybody may write, and belongs to another user or is a link; raises OSError."""
    try:
        there, around = folder.lstat(), folder.parent.stat()
    except FileNotFoundError:
        return
    ours = there.st_uid in {0, os.geteuid()} and not stat.S_ISLNK(there.st_mode)
    if around.st_mode & stat.S_IWOTH and not ours:
        raise PermissionError(f"{folder} is somebody else's")
