"""Processes that should be gone, whoever started them and waits for them."""

from __future__ import annotations

import os
import time


def is_gone(pid: int) -> bool:
    """Whether a process ends, and is waited for, before long."""
    for _ in range(1000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
