"""A slot stands in a partition's place for good, and costs a call no Python frame."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from pygraphd.client.dispatch.slot import Slot


def frames(inputs: list[Any]) -> int:
    depth, frame = 0, sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        depth += 1
    return depth


def test_a_slot_runs_what_is_in_it_and_has_no_frame_of_its_own() -> None:
    slot = Slot(frames)

    assert slot([]) == frames([])
    slot.run = len
    assert slot([1, 2]) == 2


def test_a_slot_can_be_referred_to_weakly_and_goes_with_its_owner() -> None:
    slot = Slot(len)
    gone = weakref.ref(slot)
    del slot

    assert gone() is None
