"""What recordings take, by what it is for: of graphs that the emulated driver runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.client.recording.builder import MIN_SCRATCH_BYTES
from tools.lab.recording_memory import Allocation, Role, footprint_of

if TYPE_CHECKING:
    from tests.support.recorder import Recorder

pytestmark = pytest.mark.torch

FLOATS = 200
"""Two blocks."""
BYTES = 4 * FLOATS


def test_each_allocation_of_a_call_is_told_by_what_it_is_for(recorder: Recorder) -> None:
    a = recorder.floats(*range(FLOATS))
    outputs = [recorder.arena.allocate(FLOATS) for _ in range(2)]
    scratch = recorder.arena.allocate(FLOATS)
    for out in (*outputs, scratch):
        recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], outputs).replay

    found = footprint_of(replay)

    assert found.allocations == (
        Allocation(Role.OUTPUT, BYTES),
        Allocation(Role.OUTPUT, BYTES),
        Allocation(Role.SCRATCH, MIN_SCRATCH_BYTES),
    )
    assert found.executables == 1
    replay.close()


def test_several_outputs_in_one_storage_are_one_allocation(recorder: Recorder) -> None:
    a, block = recorder.floats(1, 2), recorder.arena.allocate(4)
    recorder.graph.scale(a, block[:2], 2.0)
    recorder.graph.scale(a, block[2:], 3.0)
    replay = recorder.built([a], [block[:2], block[2:]]).replay

    (only,) = footprint_of(replay).allocations

    assert only.role is Role.OUTPUT
    replay.close()
