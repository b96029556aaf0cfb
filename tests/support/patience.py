"""A client that waits long for a daemon: beside other work, an answer may take longer than a program should wait for it.

A program does without an answer after a quarter of a second. Where a test is about what the daemon answers, that clock
must not decide. What runs out in time is tested where the peer is at fault (`test_transport.py`, `test_trouble.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pygraphd.client.decisions.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

PATIENCE_S = 60.0
_FOLDER = Path(__file__).with_name("patient")


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Have every client of this process wait, those of later on, too."""
    patch.setattr(Transport.__init__, "__defaults__", (PATIENCE_S, PATIENCE_S))


def patient(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which the clients of a new Python process wait, and which else are those given."""
    path = filter(None, (str(_FOLDER), environ.get("PYTHONPATH")))
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}
