"""Socket activation (sd_listen_fds(3)): systemd binds our socket, and starts the daemon at the first connection."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from pygraphd.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path

_FIRST = 3
"""The first descriptor that systemd hands over."""
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited_socket(environ: MutableMapping[str, str], path: Path) -> socket.socket | None:
    """Return the listening socket at `path` that this process was started with, None if it was started without one.

    The variables are taken out of `environ`, as they are for one process only. Raises CommandError for a socket that is none of
    ours.
    """
    pid, count = environ.get("LISTEN_PID"), environ.get("LISTEN_FDS")
    for name in _VARIABLES:
        environ.pop(name, None)
    # A child of the process that systemd started inherits the variables, but not what they describe.
    if pid != str(os.getpid()):
        return None
    if count != "1":
        raise CommandError(f"systemd handed over {count} sockets, and one is expected; {_REMEDY}")
    return _checked(_FIRST, path)


_REMEDY = "write the units anew: pygraphd systemd-units"


def _checked(descriptor: int, path: Path) -> socket.socket:
    try:
        inherited = socket.socket(fileno=descriptor)
        # It has come through an exec, so it lacks close-on-exec, which sockets that Python makes have.
        inherited.set_inheritable(False)
        is_listening = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        name = inherited.getsockname()
    except OSError as error:
        raise CommandError(f"systemd handed over what is no socket: {error.strerror}; {_REMEDY}") from error
    if not is_listening or inherited.family != socket.AF_UNIX or name != str(path):
        raise CommandError(
            f"systemd listens on {name!r}, but programs look for {path} with these settings; {_REMEDY}"
        )
    return inherited
