"""An exception that a signal handler of the program raises is the program's, whenever the signal comes, and no call runs twice."""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.backend.errors import REENTERED
from pygraphd.client.common.guard import guarded
from pygraphd.client.common.report import Report
from pygraphd.client.common.signals import raised_by_handler
from pygraphd.client.decisions.transport import Transport
from pygraphd.client.recording import size_slot
from pygraphd.client.recording.pipeline import Pipeline
from pygraphd.client.recording.size_slot import SizeSlot
from pygraphd.client.recording.verification import Verification
from pygraphd.client.replay.replay import Replay
from tests.support.recording_case import Case, Operations, add, case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["case"]  # a fixture
pytestmark = pytest.mark.torch


class TimeLimitError(TimeoutError):
    """As job queues define it."""


class Limit:
    """A handler of a class of the program's own."""

    def __call__(self, *_: object) -> None:
        raise TimeLimitError("the time is over")

    def method(self, *_: object) -> None:
        self()


def limit(*_: object) -> None:
    raise TimeLimitError("the time is over")


HANDLERS: list[Callable[..., Any]] = [
    limit,
    Limit(),
    Limit().method,
    functools.partial(limit, 1),
    lambda *_: limit(),
]


@pytest.fixture(params=range(len(HANDLERS)))
def handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def limited() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, limit)
    yield
    signal.signal(signal.SIGUSR1, before)


def strike(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.usefixtures("handled")
def test_an_exception_of_a_handler_is_told_from_others() -> None:
    with pytest.raises(TimeLimitError) as raised:
        strike()
    assert raised_by_handler(raised.value)

    with pytest.raises(TimeLimitError) as raised:
        raise TimeLimitError
    assert not raised_by_handler(raised.value)
    assert not raised_by_handler(TimeLimitError())
    assert not raised_by_handler(None)


@pytest.mark.usefixtures("limited")
def test_it_is_not_counted_as_a_failure_of_ours() -> None:
    report = Report()
    with pytest.raises(TimeLimitError), guarded(report, "something"):
        strike()
    with guarded(report, "something"):
        raise TimeLimitError

    assert report.summary()["failures"] == {"something: TimeLimitError": 1}


@pytest.mark.usefixtures("limited")
def test_it_is_no_missing_answer_of_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraphd.client.decisions.transport.ownership.connect", strike)

    with pytest.raises(TimeLimitError):
        Transport(tmp_path / "s").request("GET", "/v1/ping")


@pytest.mark.usefixtures("limited")
def test_a_signal_within_a_capture_ends_the_call_and_refuses_nothing(case: Case) -> None:
    struck = threading.Event()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.as_kernels and not struck.is_set():
            struck.set()
            strike()
        return add(operations, inputs)

    run = case.make(body)
    run([case.floats(1), case.floats(2)])
    with pytest.raises(TimeLimitError):
        run([case.floats(1), case.floats(2)])
    assert refusal_of(run) is None
    for _ in range(3):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    case.expect(captured=1)


def test_a_handler_runs_after_the_recording_that_its_signal_came_in(case: Case) -> None:
    """What it does on the GPU, as to save a checkpoint, would be captured, and not done; a graph that it calls is recorded next."""
    struck, at = threading.Event(), list[bool]()
    other = case.make(add)

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.as_kernels and not struck.is_set():
            struck.set()
            strike()
        return add(operations, inputs)

    def handler(*_: object) -> None:
        at.append(case.recorder.operations is case.recorder.as_kernels)
        at.extend(other([case.floats(3), case.floats(4)])[0].tolist() == [7] for _ in range(4))

    run = case.make(body)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(4):
            assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert at == [True] * 5
    case.expect(captured=2)


@pytest.mark.usefixtures("limited")
def test_a_recording_whose_end_a_handler_raises_at_is_destroyed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done when the handler runs, and nobody has it."""
    run = case.make(add)
    run([case.floats(1), case.floats(2)])
    before, record = case.emulator.live(), Pipeline._record

    def struck_at_the_end(*arguments: Any, **options: Any) -> Any:
        made = record(*arguments, **options)
        strike()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_record", struck_at_the_end)
        with pytest.raises(TimeLimitError):
            run([case.floats(1), case.floats(2)])

    assert case.emulator.live() == before
    for _ in range(3):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    case.expect(captured=1)


def test_a_handler_may_call_a_graph_while_its_recordings_change(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = case.make(add), list[Any]()

    def strike_first(size: Any, **more: Any) -> Any:
        monkeypatch.setattr(size_slot, "SizeSlot", SizeSlot)
        strike()
        return SizeSlot(size, **more)

    monkeypatch.setattr(size_slot, "SizeSlot", strike_first)
    before = signal.signal(
        signal.SIGUSR1, lambda *_: seen.append(run([case.floats(3), case.floats(4)])[0].tolist())
    )
    try:
        for _ in range(4):
            assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert seen == [[7]]
    case.expect(captured=1)


@pytest.mark.usefixtures("limited")
def test_a_signal_within_a_verification_ends_the_call(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.make(add)
    run([case.floats(1), case.floats(2)])
    with monkeypatch.context() as patch:
        patch.setattr(Verification, "disagreement", strike)
        with pytest.raises(TimeLimitError):
            run([case.floats(1), case.floats(2)])
    assert refusal_of(run) is None
    for _ in range(3):
        run([case.floats(1), case.floats(2)])
    case.expect(captured=1)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("in_python", [False, True])
def test_a_call_whose_launch_a_signal_follows_does_not_run_again(
    case: Case, monkeypatch: pytest.MonkeyPatch, in_python: bool
) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        return (operations.random(),)

    armed = False
    launch = case.emulator.driver.launch

    def launch_and_strike(executable: int, stream: int) -> None:
        launch(executable, stream)
        if armed:
            strike()

    monkeypatch.setattr(case.emulator.driver, "launch", launch_and_strike)
    cache, one = case.floats(0), case.floats(1)
    made = case.make(body)
    for _ in range(4):
        made([cache, one])
    run, armed = made if in_python else made.run, True
    for _ in range(10):
        with pytest.raises(TimeLimitError):
            run([cache, one])

    assert cache.tolist() == [14]
    case.expect(captured=1)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("in_python", [False, True])
def test_a_handler_may_call_a_graph_within_a_launch_of_it(
    case: Case, monkeypatch: pytest.MonkeyPatch, draws: bool, in_python: bool
) -> None:
    """As one that prints a sample. It would wait for the launch that waits for it."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        total = operations.add(operations.add(inputs[0], inputs[1]), inputs[1])
        return (total, operations.random()) if draws else (total,)

    is_armed = False
    launch = case.emulator.driver.launch

    def strike_within(executable: int, stream: int) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            strike()
        launch(executable, stream)

    monkeypatch.setattr(case.emulator.driver, "launch", strike_within)
    # Without it the helper calls the driver by itself.
    monkeypatch.setattr(Replay, "_fused_launch", lambda replay: replay._start)
    made, samples = case.make(body), list[Any]()
    for _ in range(4):
        made([case.floats(1), case.floats(2)])
    run = made if in_python else made.run
    before = signal.signal(signal.SIGUSR1, lambda *_: samples.append(run([case.floats(3), case.floats(4)])))
    try:
        for _ in range(10):
            is_armed = True
            assert run([case.floats(1), case.floats(2)])[0].tolist() == [5]
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert [sample[0].tolist() for sample in samples] == [[11]] * 10
    assert case.report.fallbacks[REENTERED] == 10
    if draws:
        assert case.recorder.generator.offset == 4 * 24
