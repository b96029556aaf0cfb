"""All frames of a replay that has nothing to write fit into the room that its first one brings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.relocatable import Relocatable
from pygraphd.client.stack import ROOM, with_room
from tests.relocation.test_relocatable import Case, accumulate_often, case

if TYPE_CHECKING:
    from types import CodeType, FrameType

__all__ = ["case"]  # a fixture

pytestmark = pytest.mark.torch

HEAD = 12
"""Words of a frame beside its variables and its stack, or more: 9 to 11 in CPython 3.11 to 3.14."""


def words(code: CodeType) -> int:
    return len(code.co_varnames) + len(code.co_cellvars) + len(code.co_freevars) + code.co_stacksize + HEAD


def deepest(run: Any, inputs: list[Any]) -> int:
    """Return how many words the frames below that of a call took at most."""
    depth = most = 0

    def seen(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, most
        if event == "call":
            depth += words(frame.f_code)
            most = max(most, depth)
        elif event == "return":
            depth -= words(frame.f_code)

    sys.setprofile(seen)
    try:
        run(inputs)
    finally:
        sys.setprofile(None)
    return most - words(Relocatable.__call__.__code__)


def test_a_replay_fits_into_the_room_of_its_first_frame(case: Case) -> None:
    run = case.make(accumulate_often)
    total, batch = case.floats(0), case.floats(10)
    for _ in range(6):
        run([total, batch])

    taken = deepest(run, [total, batch])

    assert 0 < taken <= ROOM
    assert Relocatable.__call__.__code__.co_stacksize >= ROOM


def test_a_function_with_room_does_what_it_did() -> None:
    @with_room
    def add(a: int, *, b: int = 2) -> int:
        """Add."""
        return a + b

    assert (add(1), add(1, b=5), add.__doc__) == (3, 6, "Add.")
    assert add.__code__.co_stacksize == ROOM
