"""Callables that differ from themselves, as where kernels add in an order of their own: recorded, but not if the recording is wrong."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.recording.verification import Verification
from tests.support.noise import SIZE, Noise
from tests.support.recording_case import Case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.emulator import Allocator, Emulator
    from tests.support.recording_case import Operations

pytestmark = pytest.mark.torch


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def test_what_differs_from_itself_is_recorded_at_the_second_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = Noise(5e-4, monkeypatch)
    run = case.make(noise.adding(case))
    for i in range(1, 6):
        (result,) = run([case.floats(*[float(i)] * SIZE)])
        assert torch.allclose(result, torch.full((SIZE,), float(i)), atol=5e-4)

    case.expect(captured=1)
    assert refusal_of(run) is None
    told = [
        reason for reason in case.report.fallbacks if reason.startswith("verification: output 0 differs by")
    ]
    assert [case.report.fallbacks[each] for each in told] == [1]


def test_noise_hides_no_wrong_recording(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with a number that the host has told it."""
    noise, host = Noise(5e-4, monkeypatch), itertools.count()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        noisy = noise.adding(case)(operations, inputs)
        return *noisy, operations.add(inputs[0], case.floats(*[next(host) / 100] * SIZE))

    run = case.make(body)
    for _ in range(6):
        run([case.floats(*[1.0] * SIZE)])

    case.expect(captured=0)
    assert str(refusal_of(run)).startswith("verification: output")


def test_what_the_host_tells_is_not_taken_for_noise_and_runs_once_a_call(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter differs a little from call to call; a recording of it would not count."""
    noise = Noise(0.0, monkeypatch)
    host = itertools.count(1000)

    def body(operations: Operations, inputs: list[Any]) -> Any:
        counted = case.floats(*[float(next(host))] * SIZE)
        return (*noise.adding(case)(operations, inputs), operations.add(inputs[0], counted))

    run = case.make(body)
    for calls in range(1, 7):
        run([case.floats(*[1.0] * SIZE)])
        assert noise.runs_as_kernels == calls

    case.expect(captured=0)
    assert run.refused_for_good


def test_host_code_runs_once_a_call_though_recordings_of_it_differ(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much it differs from itself stays unknown: to find out, it would run again."""
    noise = Noise(5e-4, monkeypatch)
    run = case.made(noise.adding(case), GraphFacts(is_repeatable=False))
    for calls in range(1, 7):
        run([case.floats(*[1.0] * SIZE)])
        assert noise.runs_as_kernels == calls

    case.expect(captured=0)


def test_what_differs_from_itself_by_far_is_not_recorded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.make(Noise(0.9, monkeypatch).adding(case))
    for _ in range(6):
        run([case.floats(*[1.0] * SIZE)])

    case.expect(captured=0)
    assert refusal_of(run) == "verification: it differs from itself"


def test_a_recording_that_runs_again_finds_the_memory_that_it_was_recorded_on(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be wrong, and reach it."""
    again, released = Verification._replay_again, list[bool]()

    def replay_again(verification: Verification, inputs: list[Any]) -> Any:
        released.append(case.recorder.recordings[-1].released)
        return again(verification, inputs)

    monkeypatch.setattr(Verification, "_replay_again", replay_again)
    run = case.make(Noise(5e-4, monkeypatch).adding(case))
    for _ in range(4):
        run([case.floats(*[1.0] * SIZE)])

    assert set(released) == {False}
    case.expect(captured=1)


def test_random_numbers_are_those_of_the_call_after_more_runs_of_it(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = Noise(5e-4, monkeypatch)

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (*noise.adding(case)(operations, inputs), operations.random())

    run = case.make(body)
    for i in range(6):
        _, drawn = run([case.floats(*[1.0] * SIZE)])
        assert drawn.tolist() == [4.0 * (i + 1)] * 2
        assert case.recorder.generator.offset == 4 * (i + 1)

    case.expect(captured=1)


# --- views -------------------------------------------------------------------------------------------------------


def test_a_negative_view_is_recorded_as_one(case: Case) -> None:
    """What stands in for it is negative, too, so that the same kernels are recorded."""
    seen = []

    def body(operations: Operations, inputs: list[Any]) -> Any:
        seen.append(inputs[0].is_neg())
        plain = torch.view_as_real(torch.view_as_complex(inputs[1]))  # the same memory
        return (operations.add(plain.reshape(-1), plain.reshape(-1)),)

    run = case.make(body)
    for i in range(4):
        memory = case.floats(1, 2, 3, i).view(2, 2)
        negative = torch.view_as_complex(memory).conj().imag
        (result,) = run([negative, memory])
        assert result.tolist() == [2, 4, 6, 2 * i]

    case.expect(captured=1)
    assert len(seen) == 3
    assert all(seen)


def test_outputs_that_are_conjugate_and_negative_views_are_recorded(case: Case) -> None:
    """Alone, and beside one that shares their memory and is no such view."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        made = operations.add(inputs[0], inputs[0])
        conjugate = torch.view_as_complex(made.view(2, 2)).conj()
        alone = operations.add(inputs[0], inputs[0])
        return conjugate, conjugate.imag, made, torch.view_as_complex(alone.view(2, 2)).conj()

    run = case.make(body)
    for i in range(5):
        conjugate, negative, made, alone = run([case.floats(1, 2, 3, i)])
        assert alone.tolist() == [2 - 4j, 6 - 2j * i]
        assert (conjugate.is_conj(), negative.is_neg(), made.is_conj()) == (True, True, False)
        assert conjugate.tolist() == [2 - 4j, 6 - 2j * i]
        assert negative.tolist() == [-4, -2 * i]
        assert made.tolist() == [2, 4, 6, 2 * i]
        made += 1
        assert conjugate.tolist() == [3 - 5j, 7 - (2j * i + 1j)]

    case.expect(captured=1)
    assert run.replays[0].counts.replays >= 3


def test_an_output_that_is_a_negative_view_of_an_input_runs_as_kernels(case: Case) -> None:
    run = case.make(lambda operations, inputs: (operations.add(*inputs * 2), torch._neg_view(inputs[0])))
    for i in range(4):
        assert [each.tolist() for each in run([case.floats(i, 1)])] == [[2 * i, 2], [-i, -1]]

    case.expect(captured=0)
    assert refusal_of(run) == "an output is a conjugate or negative view of an input"
