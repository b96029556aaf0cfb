"""Attention's random state: on the host for whoever calls, on the device in a recording, and the same whichever way either side runs."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.analysis.attention_rng import RngState
from pygraphd.client.analysis.graph_facts import BackwardFacts, GraphFacts
from pygraphd.client.recording import recordings
from pygraphd.client.recording.attention_host import NOT_SENT, ON_THE_GPU, READ_BACK, WithHostState
from tests.support.recording_case import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.emulator import Allocator, Emulator
    from tests.support.recording_case import Operations

pytestmark = pytest.mark.torch

AHEAD = RngState(seeds=(2,), offsets=(1,), idle_outputs=(3,))
BEHIND = RngState(inputs=(1, 2), idle_inputs=(3,))


@pytest.fixture
def sent(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[torch.Tensor]]:
    """What was copied to the device; it lies where its allocator puts it, aligned as it always is."""
    sent: list[Sequence[torch.Tensor]] = []

    def send(_: WithHostState, scalars: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        sent.append(scalars)
        return allocator.tensor(torch.stack(list(scalars))).unbind() if scalars else ()

    monkeypatch.setattr(WithHostState, "_sent", send)
    return sent


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator, sent: list[Sequence[torch.Tensor]]) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def attend(operations: Operations, inputs: list[Any]) -> Any:
    """Return x + x, the offset and the seed, and what attention hands over that drops nothing."""
    seed, offset = operations.attention()
    return operations.add(inputs[0], inputs[0]), offset, seed, torch.empty((), dtype=torch.int64)


def doubled(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.add(inputs[0], inputs[0]),)


class Backward:
    """Returns g + g and the numbers that it finds; keeps what it was given."""

    def __init__(self) -> None:
        self.as_kernels: list[list[Any]] = []
        self.recorded: list[list[Any]] = []

    def __call__(self, operations: Operations, inputs: list[Any]) -> Any:
        (self.recorded if hasattr(operations, "graph") else self.as_kernels).append(inputs)
        assert isinstance(inputs[3], torch.Tensor)
        return (
            operations.add(inputs[0], inputs[0]),
            operations.number(inputs[1]),
            operations.number(inputs[2]),
        )


class Step:
    """A forward and a backward, each relocated if that is wanted."""

    def __init__(self, case: Case, *, ahead: bool = True, behind: bool = True) -> None:
        self.backward = Backward()
        forward, backward = case.recorder.compiled(attend), case.recorder.compiled(self.backward)
        self._ahead = case.make(attend, state=AHEAD) if ahead else forward
        self._behind = case.make(self.backward, state=BEHIND) if behind else backward
        self._case = case
        self.state: list[Any] = []

    def __call__(self) -> tuple[float, int, int]:
        """Return what the backward has computed and found."""
        _, *self.state = self._ahead([self._case.floats(1.0)])
        assert all((each.is_cpu, each.dtype, each.dim()) == (True, torch.int64, 0) for each in self.state)
        gradient, offset, seed = self._behind([self._case.floats(3.0), *self.state])
        return float(gradient), int(offset), int(seed)


@pytest.mark.parametrize("returned", [None, frozenset[int]()])
def test_a_forward_whose_backward_is_known_is_recorded(case: Case, returned: frozenset[int] | None) -> None:
    """Of the outputs that are saved for the backward, idle RNG state is no tensor while it is recorded."""
    run = case.made(
        attend, GraphFacts(state=AHEAD, saved=frozenset({1, 2, 3}), backward=BackwardFacts(returned))
    )
    for call in range(6):
        total, *state = run([case.floats(float(call))])
        assert float(total) == 2 * call
        assert all(each.is_cpu for each in state)
    case.expect(captured=1)
    assert not case.report.failures


@pytest.mark.parametrize(("ahead", "behind"), list(itertools.product([True, False], repeat=2)))
def test_a_backward_finds_what_its_forward_drew_whichever_way_they_run(
    case: Case, ahead: bool, behind: bool
) -> None:
    step, generator = Step(case, ahead=ahead, behind=behind), case.recorder.generator
    for call in range(12):
        if call == 8:
            generator.seed, generator.offset = 1 << 62, 400
        began = generator.offset

        assert step() == (6.0, began + 4, generator.seed)
        assert generator.offset == began + 8
    case.expect(captured=ahead + behind)
    assert case.report.fallbacks == ({recordings.NOT_YET: ahead + behind} if ahead or behind else {})


def attend_twice(operations: Operations, inputs: list[Any]) -> Any:
    """Return x + x, an offset, the seed, what attention hands over that drops nothing, and another offset."""
    seed, first = operations.attention()
    _, second = operations.attention()
    return operations.add(inputs[0], inputs[0]), first, seed, torch.empty((), dtype=torch.int64), second


def test_what_is_handed_out_stays_what_it_is(case: Case) -> None:
    run = case.make(attend_twice, state=replace(AHEAD, offsets=(1, 4)))
    seen = []
    for _ in range(8):
        began = case.recorder.generator.offset
        _, first, seed, _, second = run([case.floats(1.0)])
        seen.append(((first, second, seed), (began + 4, began + 12, case.recorder.generator.seed)))

    for handed_out, expected in seen:
        assert tuple(map(int, handed_out)) == expected
        assert not any(each._is_view() or each.requires_grad for each in handed_out)
    case.expect(captured=1)


def test_a_seed_of_64_bits_is_handed_out_with_a_sign(case: Case) -> None:
    step = Step(case)
    case.recorder.generator.seed = (
        -5
    )  # as the kernels and PyTorch's scalars have it; generators say 2**64 - 5

    assert [step()[2] for _ in range(6)] == [-5] * 6
    case.expect(captured=2)
    assert READ_BACK not in case.report.fallbacks


def test_what_runs_as_kernels_is_given_what_the_caller_gave_and_returns_what_it_did(
    case: Case, sent: list[Sequence[torch.Tensor]]
) -> None:
    step = Step(case)
    for _ in range(3):
        step()
    given = [torch.tensor(5), torch.tensor(6), torch.tensor(0)]
    case.recorder.capturing = True
    sent.clear()

    step._behind([case.floats(3.0), *given])
    case.recorder.capturing = False

    assert sent == [], "within a capture of the user's a copy from the host would be captured"
    assert all(mine is theirs for mine, theirs in zip(step.backward.as_kernels[-1][1:], given, strict=True))
    (recorded,) = step.backward.recorded
    assert not any(each is state for each in recorded[1:] for state in step.state)


def test_what_comes_from_a_capture_of_the_users_is_left_as_it_is(case: Case) -> None:
    """Its forward was captured by the user, and has left its state on the GPU; here the meta device stands for one."""
    step = Step(case)
    for _ in range(3):
        step()
    given = [torch.empty((), dtype=torch.int64, device="meta") for _ in range(3)]

    with pytest.raises(RuntimeError):  # of the body, which cannot read these
        step._behind([case.floats(3.0), *given])

    assert all(mine is theirs for mine, theirs in zip(step.backward.as_kernels[-1][1:], given, strict=True))
    assert case.report.fallbacks[ON_THE_GPU] == 1


@pytest.mark.parametrize("swapped", ["seed", "offset"])
def test_state_that_does_not_follow_from_the_generators_is_read(case: Case, swapped: str) -> None:
    def strange(operations: Operations, inputs: list[Any]) -> Any:
        (seed, offset), (same, later) = operations.attention(), operations.attention()
        two = (later, offset) if swapped == "seed" else (seed, same)
        return operations.add(inputs[0], inputs[0]), *two

    run = case.make(strange, state=RngState(seeds=(1,), offsets=(2,)))
    case.recorder.generator.seed = 99_999

    results = [[int(each) for each in run([case.floats(1.0)])[1:]] for _ in range(5)]

    given = [12, 4] if swapped == "seed" else [99_999, 99_999]
    assert results == [[each + 16 * i * (swapped == "seed") for each in given] for i in range(5)]
    # The first replay is asked in any case, as its recording is new; after that each call says so.
    assert case.report.fallbacks[READ_BACK] == 2


def test_each_size_has_offsets_of_its_own(case: Case) -> None:
    def draws(operations: Operations, inputs: list[Any]) -> Any:
        for _ in range(inputs[1]):
            operations.attention()
        seed, offset = operations.attention()
        return operations.add(inputs[0], inputs[0]), offset, seed

    run = case.make(draws, state=RngState(seeds=(2,), offsets=(1,)))
    for size in (0, 0, 0, 2, 2, 2, 0, 2):
        began = case.recorder.generator.offset
        outputs = run([case.floats(1.0), size])

        assert int(outputs[1]) == began + 4 + 8 * size
    case.expect(captured=2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(st.integers(0, 40).map(lambda n: 4 * n), min_size=4, max_size=10))
def test_others_may_draw_in_between(case: Case, drawn: list[int]) -> None:
    step, generator = Step(case), case.recorder.generator
    for each in drawn:
        generator.offset += each
        began = generator.offset

        assert step() == (6.0, began + 4, generator.seed)


def test_a_default_device_of_the_users_is_not_where_the_state_goes(case: Case) -> None:
    step = Step(case, behind=False)
    for _ in range(3):
        step()
    case.recorder.generator.seed = 9

    inputs = [case.floats(1.0)]

    with torch.device("meta"):
        _, offset, seed, _ = step._ahead(inputs)

    assert (int(offset), int(seed)) == (28, 9)
    case.expect(captured=1)


def test_what_cannot_be_sent_has_the_call_run_as_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(case)
    for _ in range(3):
        step()

    def full(_: WithHostState, scalars: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if scalars:
            raise torch.OutOfMemoryError
        return ()

    monkeypatch.setattr(WithHostState, "_sent", full)
    assert [step() for _ in range(2)] == [(6.0, 28, 0), (6.0, 36, 0)]
    assert case.report.fallbacks == {recordings.NOT_YET: 2, f"{NOT_SENT}: OutOfMemoryError": 2}

    another = Step(case, behind=False)  # whose recordings cannot be verified
    assert [another() for _ in range(4)] == [(6.0, 44 + 8 * i, 0) for i in range(4)]


def test_a_call_that_runs_as_kernels_sends_nothing_that_it_returns(
    case: Case, sent: list[Sequence[torch.Tensor]]
) -> None:
    run = case.make(attend, state=AHEAD)

    *_, offset, seed, _ = run([case.floats(1.0)])

    assert sent == [[]]
    assert (int(offset), int(seed)) == (4, 0)


def test_two_threads_are_handed_their_own(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits on its way to running as KERNELS, while another does."""
    backward = Backward()
    run = case.make(backward, state=BEHIND)
    note, waiting, go_on = case.report.count_fallback, threading.Event(), threading.Event()

    def wait(reason: str) -> None:
        note(reason)
        if threading.current_thread() is other:
            waiting.set()
            go_on.wait(10)

    monkeypatch.setattr(case.report, "count_fallback", wait)
    given = [[torch.tensor(10 * i + j) for j in range(3)] for i in range(2)]
    other = threading.Thread(target=run, args=([case.floats(1.0), *given[0]],))
    other.start()
    assert waiting.wait(10)
    run([case.floats(1.0), *given[1]])
    go_on.set()
    other.join()

    assert {tuple(map(int, each[1:])) for each in backward.as_kernels} == {(0, 1, 2), (10, 11, 12)}
    assert isinstance(run, WithHostState)
    assert run._call.given == ()


@pytest.mark.parametrize(("body", "state"), [(doubled, RngState()), (attend, AHEAD)])
def test_a_call_asks_once_whether_the_user_captures(
    case: Case, monkeypatch: pytest.MonkeyPatch, body: Callable[[Operations, list[Any]], Any], state: RngState
) -> None:
    run = case.make(body, state=state)
    for _ in range(4):
        run([case.floats(1.0)])
    asked = []

    def in_capture() -> bool:
        asked.append(run)
        return False

    monkeypatch.setattr(case.recorder, "in_capture", in_capture)
    run([case.floats(1.0)])

    assert asked == [run]
    case.expect(captured=1)
