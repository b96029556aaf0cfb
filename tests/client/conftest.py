"""What several rooms' tests share: a user's program in a process of its own, and a driver over host memory."""

from __future__ import annotations

from tests.support.emulator import allocator, compiled_helper, emulator, emulator_library, recorder
from tests.support.user_program import run

__all__ = ["allocator", "compiled_helper", "emulator", "emulator_library", "recorder", "run"]
