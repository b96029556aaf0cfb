"""The cores that a test runs on: all that this process may use, whichever the test before has chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    """Have each test begin on all cores, whichever the one before has chosen."""
    mine = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, mine)
