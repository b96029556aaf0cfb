"""Interrupts of the user's, which may come before any instruction of Python's."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType


@contextlib.contextmanager
def interrupting(code: CodeType, instruction: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the n-th instruction of some code that is run from now on, counted over all its calls."""
    left = instruction

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if not left:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
