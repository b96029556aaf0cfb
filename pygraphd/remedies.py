"""What a person can do about a file or folder that the system does not let this user read."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from pygraphd.schema.ownership import REMEDY

if TYPE_CHECKING:
    from pathlib import Path


def unreadable(path: Path, error: OSError) -> str:
    """Return that a file or folder cannot be read and why, with the remedy if this user may not."""
    said = f"{path}: cannot be read: {error.strerror or error}"
    return f"{said}; {for_access(path)}" if isinstance(error, PermissionError) else said


def for_access(path: Path) -> str:
    """Return the remedy where a file or folder may not be used: a new mode for what is this user's own, else another home."""
    closed = next((each for each in reversed(path.parents) if not _may_enter(each)), path)
    try:
        status = closed.stat()
    except OSError:
        return REMEDY
    if status.st_uid != os.geteuid():
        return REMEDY
    return f"run: chmod {700 if stat.S_ISDIR(status.st_mode) else 600} {closed}"


def _may_enter(folder: Path) -> bool:
    return os.access(folder, os.X_OK, effective_ids=True)
