"""Any program gives as a relocatable graph what it gives as KERNELS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.recording.builder import LAUNCHES_NOTHING
from tests.support.builder_case import SIZE, Step, plain, readable, record
from tests.support.recorder import Recorder

if TYPE_CHECKING:
    from tests.support.emulator import Allocator, Emulator

pytestmark = pytest.mark.torch


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["add", "scale", "gather", "copy", "in place"]),
        st.tuples(*[st.integers(0, 30)] * 3),
        st.sampled_from([4, 8, 100, 130, 300]),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    steps=STEPS,
    moves=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=5
    ),
)
def test_any_program_gives_what_it_gives_as_kernels(
    emulator: Emulator,
    allocator: Allocator,
    steps: list[Step],
    moves: list[tuple[int, int, int]],
) -> None:
    """Temporaries share memory, inputs stay or move, all old memory is poisoned."""
    steps = readable(steps, 3)
    inputs = [allocator.tensor(torch.rand(SIZE)) for _ in range(3)]
    recorder = Recorder(emulator, allocator, emulator.arena(256))
    try:
        built, returned = record(recorder, steps, inputs)
    except NotRelocatableError as error:
        if str(error) != LAUNCHES_NOTHING:
            raise
        return
    for move in moves:
        inputs = [
            allocator.tensor(torch.rand(SIZE)) if moved else each
            for each, moved in zip(inputs, move, strict=True)
        ]
        mine = [each.clone() for each in inputs]
        expected = plain(steps, mine)

        outputs = built.replay.serve(list(inputs))[0]

        for output, number in zip(outputs, returned, strict=True):
            assert torch.equal(output, expected[number])
        assert all(map(torch.equal, inputs, mine))
        assert recorder.arena.untouched()
    assert recorder.notes == []
    built.replay.close()
    allocator.check()
