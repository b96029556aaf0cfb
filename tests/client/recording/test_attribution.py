"""A trace of torch's profiler names the compiled graph around each launch of a GRAPH; without a profiler a call is as short as ever."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.errors import PROFILED, ProfiledError
from pygraphd.client.backend.torch_private import profiling
from pygraphd.client.recording import recordings
from pygraphd.client.recording.verification import Verification
from pygraphd.schema.messages import Graph, Kind
from tests.support.recording_case import Case, Operations
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.client.recording.recordings import Recordings
    from tests.support.emulator import Allocator, Emulator

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

GRAPH = Graph("0123456789abcdef" * 4, Kind.BACKWARD, 1, 3, operators=5)
NAME = "pygraph: backward 0123456789ab 2/3"


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def doubled(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.add(inputs[-1], inputs[-1]),)


def recorded(case: Case, *sizes: int) -> Recordings:
    made = case.made(doubled, GraphFacts(name=GRAPH.name, digest=GRAPH.digest))
    for _ in range(4):
        made.run([*sizes, case.floats(1, 1)])
    assert len(made.replays) == 1
    return made


def names(profiler: Any) -> list[str]:
    """Return the annotations of the user's kind, which the profiler draws over the GPU's kernels as well."""
    return [each.name for each in profiler.events() if each.is_user_annotation and "pygraph" in each.name]


def profiled() -> Any:
    return profile(activities=[ProfilerActivity.CPU], acc_events=True)


@pytest.mark.parametrize("sizes", [(), (8, 3)])
def test_a_trace_names_the_graph_at_each_launch(case: Case, sizes: tuple[int, ...]) -> None:
    made = recorded(case, *sizes)
    before = made.replays[0].counts.fused

    with profiled() as profiler:
        outputs = [made.run([*sizes, case.floats(i, i)])[0].tolist() for i in range(3)]

    assert names(profiler) == [NAME + (" at 8,3" if sizes else "")] * 3
    assert outputs == [[2.0 * i] * 2 for i in range(3)]
    assert made.replays[0].counts.fused == before + 3


def test_nothing_is_recorded_while_a_profiler_runs(case: Case) -> None:
    made = case.made(doubled, GraphFacts())
    with profiled() as profiler:
        outputs = [made.run([case.floats(i, i)])[0].tolist() for i in range(4)]

    case.expect(captured=0)
    assert (names(profiler), outputs) == ([], [[2.0 * i] * 2 for i in range(4)])
    assert case.report.fallbacks == {recordings.NOT_YET: 1, PROFILED: 3}

    made.run([case.floats(1, 1)])
    case.expect(captured=1)


def test_a_layout_that_comes_back_is_not_recorded_while_a_profiler_runs(case: Case) -> None:
    made, storage = recorded(case), case.allocator.tensor(torch.ones(64))
    with profiled():
        for _ in range(8):
            assert made.run([storage[1:3]])[0].tolist() == [2.0, 2.0]

    case.expect(captured=1)
    for _ in range(8):
        made.run([storage[1:3]])
    case.expect(captured=2)


def test_a_profile_that_begins_during_a_recording_refuses_one_call_only(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has begun it, and the recording could get no further executable."""

    def fail(*_: Any) -> None:
        raise ProfiledError

    for function in (Verification._replay_once, Verification.disagreement):
        made = case.made(doubled, GraphFacts())
        made.run([case.floats(1, 1)])
        with monkeypatch.context() as patch:
            patch.setattr(Verification, function.__name__, fail)
            assert made.run([case.floats(2, 2)])[0].tolist() == [4, 4]
        assert (refusal_of(made), len(made.replays)) == (None, 0)

        made.run([case.floats(3, 3)])
        assert len(made.replays) == 1


def test_kernels_are_not_named_as_a_graph(case: Case) -> None:
    made = recorded(case)
    case.recorder.capturing = True

    with profiled() as profiler:
        made.run([case.floats(1, 1)])

    assert names(profiler) == []


def copied(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.number(inputs[0]),)


@pytest.mark.parametrize("is_first", [False, True])
def test_in_a_profile_a_graph_that_copies_is_no_graph_if_its_executable_is_from_after_another(
    case: Case, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """CUPTI has it point to records of memory that may be gone."""
    monkeypatch.setattr(profiling._profiles, "were_prepared", not is_first)
    made = case.made(copied, GraphFacts(name=GRAPH.name, digest=GRAPH.digest))
    numbers = [case.allocator.tensor(torch.tensor(i)) for i in range(3)]
    for _ in range(4):
        made.run([numbers[1]])
    before = made.replays[0].counts.replays

    with profiled() as profiler:
        outputs = [made.run([each])[0].item() for each in numbers]
    in_profile = made.replays[0].counts.replays - before
    assert made.run([numbers[2]])[0].item() == 2

    assert outputs == [0, 1, 2]
    assert names(profiler) == [NAME] * in_profile
    assert in_profile == (3 if is_first else 0)
    assert case.report.fallbacks[PROFILED] == 3 - in_profile
    assert made.replays[0].counts.replays == before + in_profile + 1


@pytest.mark.parametrize("is_ready", [False, True])
def test_only_while_a_profiler_runs_or_is_ready_does_a_call_leave_the_helper(
    case: Case, monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    made = recorded(case)
    run = made.run
    python: list[Any] = []
    replay = made._replay

    def noted(*given: Any) -> Any:
        python.append(given)
        return replay(*given)

    monkeypatch.setattr(made, "_replay", noted)
    seen = []
    for running in (False, True, False):
        with (
            monkeypatch.context() as patch,
            profiled() if running and not is_ready else contextlib.nullcontext(),
        ):
            if running and is_ready:
                patch.setitem(profiling._profiles.flags, profiling._READY, True)
            run([case.floats(1, 1)])
        seen.append(len(python))

    assert seen == [0, 1, 1]


def test_an_error_in_a_launch_is_a_fallback_all_the_same(case: Case) -> None:
    made = recorded(case)
    replay = made.replays[0]
    replay.counts.expect = lambda _stream: 1 / 0  # type: ignore[assignment]

    with profiled() as profiler:
        outputs = made.run([case.floats(3, 3)])

    assert outputs[0].tolist() == [6.0, 6.0]
    assert names(profiler) == [NAME]
    assert case.report.fallbacks["a replay failed: ZeroDivisionError"] == 1
    assert torch.autograd.profiler._is_profiler_enabled is False
