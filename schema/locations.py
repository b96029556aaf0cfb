"""The paths of all files: socket, lock, database, log, spool. Client and daemon have to agree on them.

With `PYGRAPHD_HOME` set, all files lie in that folder. Otherwise the XDG folders hold them: socket and lock, which do not outlive
a boot, `XDG_RUNTIME_DIR`; everything else `XDG_CACHE_HOME`. A user without a home or a passwd entry is no error.
A socket whose path would be too long for the kernel lies in `/tmp/pygraphd-UID` in either case.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "pygraphd"
_MAX_SOCKET_PATH = 100
"""The kernel takes 107 bytes for a Unix socket's path; some are left for a temporary suffix."""


@dataclass(frozen=True, slots=True)
class Locations:
    """The paths of one daemon and its cache. Making the folders is the writer's business: see `pygraphd.folders`."""

    runtime: Path
    cache: Path
    socket: Path

    @property
    def lock(self) -> Path:
        """Held by the daemon while it lives, and by a command while it writes without a daemon. Never deleted."""
        return self.runtime / f"{_NAME}.lock"

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.cache / "cache.db"

    @property
    def team_queue(self) -> Path:
        """The SQLite file of records that are to be published to a team."""
        return self.cache / "team.db"

    @property
    def log(self) -> Path:
        """The log of a daemon without a terminal."""
        return self.cache / f"{_NAME}.log"

    @property
    def spool(self) -> Path:
        """Files, one `RecordRequest` each, which clients left because they found no daemon."""
        return self.cache / "spool"


def locate(environ: Mapping[str, str] | None = None) -> Locations:
    """Return the paths that the environment variables ask for; creates nothing, raises nothing."""
    environ = os.environ if environ is None else environ
    if home := environ.get("PYGRAPHD_HOME"):
        # A daemon runs in "/", where a relative path would lead to another folder.
        folder = Path(home).absolute()
        return Locations(folder, folder, _socket(folder))
    runtime = _runtime_folder(environ)
    return Locations(runtime, _cache_folder(environ, runtime), _socket(runtime))


def environ_elsewhere(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with which a process in another folder finds the same places."""
    environ = os.environ if environ is None else environ
    home = environ.get("PYGRAPHD_HOME")
    return {**environ, "PYGRAPHD_HOME": str(Path(home).absolute())} if home else dict(environ)


def _runtime_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_RUNTIME_DIR")
    # The XDG specification has programs ignore relative paths.
    if base and Path(base).is_absolute():
        return Path(base) / _NAME
    return _private_temporary_folder()


def _private_temporary_folder() -> Path:
    # Not TMPDIR: it differs between the processes of one user, who must all find the same socket.
    return Path("/tmp") / f"{_NAME}-{os.getuid()}"


def _cache_folder(environ: Mapping[str, str], default: Path) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / _NAME
    # Not `Path.home`, which raises for a uid without a passwd entry, as containers have.
    home = environ.get("HOME")
    return Path(home) / ".cache" / _NAME if home and Path(home).is_absolute() else default


def _socket(folder: Path) -> Path:
    path = folder / f"{_NAME}.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return _private_temporary_folder() / f"{short}.sock"
