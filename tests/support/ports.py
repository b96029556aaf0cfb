"""TCP ports for servers that are started later than their port is chosen."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20_000, 30_000)
"""Below those that the kernel gives to clients, one of which could take ours before the server, or while it is down."""
_RANDOM = random.SystemRandom()
"""Not the generator that a test may have seeded: pytest's workers would choose the same ports."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    for port in _RANDOM.sample(_PORTS, 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
