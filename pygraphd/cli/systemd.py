"""`pygraphd systemd-units`: a user service and its socket, for the paths that programs use with the variables set here."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pygraphd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pygraphd.schema.locations import Locations

_VARIABLES = ("PYGRAPHD_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
"""Variables that decide where files lie; a user's systemd does not have those of a shell."""

_SOCKET = """\
[Unit]
Description=Socket of pygraphd, the cache of PyGraph

[Socket]
ListenStream={socket}
SocketMode=0600
DirectoryMode=0700

[Install]
WantedBy=sockets.target
"""
# on-failure: a daemon that was idle ends with 0, and the next connection to the socket starts it again.
_SERVICE = """\
[Unit]
Description=pygraphd, the cache of PyGraph
Requires=pygraphd.socket
After=pygraphd.socket

[Service]
ExecStart={python} -m pygraphd start --foreground
ExecReload=/bin/kill -HUP $MAINPID
WorkingDirectory=/
{environment}UMask=0077
NoNewPrivileges=yes
Restart=on-failure

[Install]
Also=pygraphd.socket
"""


def units(locations: Locations, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each unit by its name; raises UsageError if programs would look for the socket elsewhere."""
    if not environ.get("PYGRAPHD_HOME") and not environ.get("XDG_RUNTIME_DIR"):
        raise UsageError(
            f"systemd-units: XDG_RUNTIME_DIR is not set, so that programs look for {locations.socket}, and a service would not;"
            " set PYGRAPHD_HOME for both"
        )
    variables = {name: environ[name] for name in _VARIABLES if environ.get(name)}
    if "PYGRAPHD_HOME" in variables:
        # As an absolute path, since a service runs in "/".
        variables["PYGRAPHD_HOME"] = str(locations.cache)
    environment = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in variables.items())
    return {
        "pygraphd.socket": _SOCKET.format(socket=_escaped(str(locations.socket))),
        # Variables are replaced in ExecStart, and not in Environment (systemd.exec(5)).
        "pygraphd.service": _SERVICE.format(python=_quoted(sys.executable, "$"), environment=environment),
    }


def units_text(texts: Mapping[str, str], folder: str) -> str:
    """Return all units as one text, each with the file that it belongs into."""
    parts = [f"# {os.path.join(folder, name)}\n{text}" for name, text in texts.items()]  # noqa: PTH118 - a text, with a "~"
    return "\n".join(parts).rstrip("\n")


def _escaped(text: str) -> str:
    """Return a text in which systemd replaces nothing (systemd.unit(5), specifiers)."""
    if not text.isprintable():
        raise UsageError(
            f"systemd-units: {text!r}: a unit cannot name it; set PYGRAPHD_HOME to another folder"
        )
    return text.replace("%", "%%")


def _quoted(text: str, doubled: str = "") -> str:
    """Return one word of a unit's value (systemd.syntax(7), quoting); `doubled` characters stand for themselves if doubled."""
    text = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    for each in doubled:
        text = text.replace(each, each * 2)
    return f'"{text}"'
