"""Room on Python's stack for what is called at every step: a function that brings it has no call below it look for more.

CPython (3.11 on) takes frames from pieces of 16 KB. The call that finds a piece full maps another one, and unmaps it when it returns:
15 to 25 us, for each call that is made right there. How deep in its own calls a program calls us is chance; at such a depth a replay
of BERT's forward took the host 165 us, and five calls deeper 120 (H200, Python 3.12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from types import FunctionType

ROOM = 256
"""Words, of 8 bytes: what all frames of a replay take that has nothing to write, in all."""

_F = TypeVar("_F")


def with_room(function: _F) -> _F:
    """Have a function's frame take `ROOM`, so that the next piece begins with it, or not before it returns."""
    python: FunctionType = function  # type: ignore[assignment] # whatever its type says of its arguments
    python.__code__ = python.__code__.replace(co_stacksize=max(python.__code__.co_stacksize, ROOM))
    return function
