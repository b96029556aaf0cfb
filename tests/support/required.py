"""Programs of other people that a test needs: it is skipped without them, or fails where a variable says that they must be there."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def require(programs: Iterable[str], variable: str) -> str:
    """Return the path of the first program that is installed; `variable` is that of `.ci/run` by which a missing one is a failure."""
    names = tuple(programs)
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    assert variable not in os.environ, f"{variable} is set, and there is no {' or '.join(names)}"
    pytest.skip(f"needs {' or '.join(names)}")
