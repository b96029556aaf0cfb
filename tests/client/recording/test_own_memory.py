"""Kernels that are given memory from outside of the call: those of operators that nobody vouches for are refused, others are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.recording.builder import KEPT_MEMORY, OWN_MEMORY, build
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.false_pointers import CapturedCall

if TYPE_CHECKING:
    from pygraphd.client.replay.relocation_table import Span
    from pygraphd.client.replay.replay import Replay
    from tests.support.recorder import Recorder

pytestmark = pytest.mark.torch


def test_kernels_may_read_what_others_own(recorder: Recorder) -> None:
    """As Inductor's may read a constant of the module."""
    inputs, constant = [recorder.floats(1, 2)], torch.ones(2)
    out = recorder.arena.allocate(2)
    recorder.graph.add(inputs[0], constant, out)
    replay = recorder.built(inputs, [out]).replay

    assert replay.serve([recorder.floats(5, 6)])[0][0].tolist() == [6, 7]
    replay.close()


def build_unvouched(
    recorder: Recorder, inputs: list[torch.Tensor], outputs: list[torch.Tensor], held: tuple[Span, ...] = ()
) -> Replay:
    recorder.emulator.host_memory(0, 1 << 20)  # where small numbers point to
    capture = Capture(recorder.graph.handle, [*outputs], tuple(recorder.arena.allocations), held)
    try:
        return build(
            recorder.emulator.driver,
            CapturedCall(capture, inputs),
            recorder.notes.append,
            None,
            GraphFacts(is_vouched=False),
        ).replay
    finally:
        recorder.arena.let_go()


def test_an_operator_that_nobody_vouches_for_is_refused_with_a_workspace_of_its_own(
    recorder: Recorder,
) -> None:
    inputs, workspace = [recorder.floats(1, 2)], torch.ones(2)
    out = recorder.arena.allocate(2)
    recorder.graph.add(inputs[0], workspace, out)

    with pytest.raises(NotRelocatableError, match="that nobody vouches for") as refused:
        build_unvouched(recorder, inputs, [out])
    assert str(refused.value) == OWN_MEMORY


def test_an_operator_that_nobody_vouches_for_is_refused_with_memory_that_it_keeps(recorder: Recorder) -> None:
    inputs = [recorder.floats(1, 2)]
    out = recorder.arena.allocate(2)
    recorder.arena.allocate(2)
    recorder.graph.add(inputs[0], inputs[0], out)

    with pytest.raises(NotRelocatableError) as refused:
        build_unvouched(recorder, inputs, [out], tuple(recorder.arena.allocations[1:]))
    assert str(refused.value) == KEPT_MEMORY


def test_an_operator_that_nobody_vouches_for_is_recorded_with_what_the_call_has(recorder: Recorder) -> None:
    inputs = [recorder.floats(1, 2), recorder.floats(3, 4)]
    temporary, out = recorder.arena.allocate(2), recorder.arena.allocate(2)
    recorder.graph.add(inputs[0], inputs[1], temporary)
    recorder.graph.add(temporary, inputs[0], out)
    replay = build_unvouched(recorder, inputs, [out])

    assert replay.serve([recorder.floats(5, 6), recorder.floats(1, 1)])[0][0].tolist() == [11, 13]
    replay.close()
