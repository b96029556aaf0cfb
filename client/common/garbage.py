"""Keeps Python's garbage collector from running during a block."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running meanwhile.

    Few of the thousands of objects that a recording makes are garbage, and a full collection after a model was compiled takes a quarter
    of a second. It might also free memory of other streams, which a capture must not see.
    """
    # A program that has switched it off itself wants it to stay off.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
