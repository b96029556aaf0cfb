"""What several rooms' tests share: a user's program in a process of its own, and a driver over host memory."""

from __future__ import annotations

from tests.support.emulator import allocator, emulator, emulator_library, recorder
from tests.support.native import compiled_helper, helper_of_all, loaded_helper
from tests.support.user_program import run

__all__ = [
    "allocator",
    "compiled_helper",
    "emulator",
    "emulator_library",
    "helper_of_all",
    "loaded_helper",
    "recorder",
    "run",
]
