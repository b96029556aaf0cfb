"""The files of a bundle: one for each entry, with the row of an export in it, and named by both halves of its key.

So a reader opens only names that it works out itself, what one process writes hides nothing of another's, and readers need no lock.
Of processes that end at once one writes at a time, so that what all have is written once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import entry_id
from pygraphd.schema.messages import decode
from pygraphd.schema.ownership import open_regular, replace_file
from pygraphd.schema.portable import BUNDLED, FORMAT, FORMAT_VERSION, HOST_PREFIXES, MAX_LINE_BYTES, Portable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from pathlib import Path

MAX_BUNDLE_FILES = 100_000
"""Files in a folder above which nothing is added."""
WRITING_S = 5.0
"""Seconds of writing after which no other file is begun."""
WAITING_S = 2.0
"""Seconds for which a process waits while another one writes; then it writes all the same."""
_POLL_S = 0.1
_SUFFIX = ".json"
_LOCK = ".writing"
"""The file whose lock the process has that writes. It stays, empty."""


def file_name(key: str) -> str:
    """Return the name of an entry's file; `key` is its `entry_id`."""
    return f"{key}{_SUFFIX}"


def content(entry: Portable) -> dict[str, object]:
    """Return the JSON object of an entry's file."""
    return {"format": FORMAT, "version": FORMAT_VERSION, "entry": dataclasses.asdict(entry)}


def read(folder: Path, environment: str, graph: str) -> Portable | None:
    """Return the entry for an environment and a graph (digests), of host `bundle:HOST`; None if there is no file.

    Raises OSError for what is not a regular file or cannot be read, and InvalidMessageError for what is not that entry.
    """
    try:
        with os.fdopen(open_regular(folder / file_name(entry_id(environment, graph))), "rb") as file:
            data = file.read(MAX_LINE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > MAX_LINE_BYTES:
        raise InvalidMessageError(f"more than {MAX_LINE_BYTES} bytes")
    content = decode(_File, data)
    if (content.format, content.version) != (FORMAT, FORMAT_VERSION):
        raise InvalidMessageError(f"version {content.version!s:.20} of {content.format!r:.40}")
    # A file that was renamed, copied or forged must not answer for another graph than its own.
    if content.entry.key != (environment, graph):
        raise InvalidMessageError("entry: is of another graph or environment")
    return _as_bundled(content.entry)


@dataclass(frozen=True, slots=True)
class _File:
    format: str
    version: int
    entry: Portable


def _as_bundled(entry: Portable) -> Portable:
    prefix = next((prefix for prefix in HOST_PREFIXES if entry.origin.host.startswith(prefix)), "")
    host = f"{BUNDLED}{entry.origin.host.removeprefix(prefix)}"[:256]
    # A clock that runs ahead elsewhere must not keep an entry from growing old.
    measured_at = None if entry.measured_at is None else min(entry.measured_at, time.time())
    origin = dataclasses.replace(entry.origin, host=host)
    return dataclasses.replace(entry, origin=origin, measured_at=measured_at)


def write(
    folder: Path,
    wanted: AbstractSet[str],
    own: AbstractSet[str],
    complete: Callable[[AbstractSet[str]], Mapping[str, Portable]],
) -> None:
    """Write the files of the entries `wanted` (keys) that are not there, and of those of `own`, each as a whole.

    `complete` returns entries by key. One process of all hosts writes at a time; those that wait find what it wrote. Raises OSError, also
    if there are `MAX_BUNDLE_FILES`, and after `WRITING_S`.
    """
    if not wanted - (_keys(folder) - own):
        return
    end = time.monotonic() + WAITING_S
    with _lock(folder / _LOCK) as is_ours:
        while True:
            may_write = is_ours() or time.monotonic() > end
            # Once more under the lock: what its holder before has written need not be written again.
            missing = wanted - (_keys(folder) - own)
            if may_write or not missing:
                break
            time.sleep(_POLL_S)
        if missing:
            _write(folder, complete(missing))


def _write(folder: Path, entries: Mapping[str, Portable]) -> None:
    until = time.monotonic() + WRITING_S
    for key, entry in entries.items():
        if time.monotonic() > until:
            raise TimeoutError(f"{folder}: not all was written in {WRITING_S:.0f} s")
        replace_file(folder / file_name(key), json.dumps(content(entry)).encode())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that tries to lock a file and returns whether the lock is held; True where the file system has no locks.

    Leaving the context releases the lock.
    """
    descriptor = None
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        # Of another user's file the lock can be had by reading, but not over NFS.
        with contextlib.suppress(PermissionError):
            # 0666: the folder and the umask give the rights, as those of a group.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | flags)

    def is_ours() -> bool:
        if descriptor is None:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        return True

    try:
        yield is_ours
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _keys(folder: Path) -> frozenset[str]:
    """Return the keys of the files in a folder, which is made if need be; raises OSError, also if there are `MAX_BUNDLE_FILES`."""
    folder.mkdir(parents=True, exist_ok=True)
    there = frozenset(name.removesuffix(_SUFFIX) for name in os.listdir(folder))  # noqa: PTH208 - names are all that is needed
    if len(there) >= MAX_BUNDLE_FILES:
        raise OSError(f"{folder} has {MAX_BUNDLE_FILES} files; delete the old ones")
    return there
