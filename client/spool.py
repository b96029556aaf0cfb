"""What a client leaves for the next daemon when it finds none: files of one `RecordRequest` each, in the spool folder."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pygraphd.schema.messages import MAX_BODY_BYTES

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILES = 1000


class SpoolFullError(OSError):
    """So many files are waiting that no daemon can have run for long; nothing more is kept."""


def leave(folder: Path, body: bytes) -> Path:
    """Write one encoded `RecordRequest`; raises OSError. A reader sees the whole file or none."""
    if len(body) > MAX_BODY_BYTES:
        raise SpoolFullError(f"{len(body)} bytes do not fit a spool file")
    folder.parent.mkdir(
        mode=0o700, parents=True, exist_ok=True
    )  # the daemon refuses one that others may write to
    folder.mkdir(mode=0o700, exist_ok=True)
    with os.scandir(folder) as files:
        if sum(1 for _ in files) >= MAX_FILES:
            raise SpoolFullError(f"{MAX_FILES} files are waiting already")
    path = folder / f"{time.time_ns()}-{os.getpid()}.json"
    temporary = path.with_name(f".{path.name}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(body)
    temporary.replace(path)
    return path
