"""Captures of graphs that draw random numbers or do not, beside other threads that draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.recording.capture import AddressesError
from tests.support.recording_case import Case, Operations, add, case

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.recording.capture import Capture

__all__ = ["case"]  # a fixture
pytestmark = pytest.mark.torch

DRAWS_NOTHING = GraphFacts(may_draw=False)


def draw(operations: Operations, inputs: list[Any]) -> Any:
    return operations.add(inputs[0], inputs[1]), operations.random()


@pytest.fixture
def captures(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each capture might draw, as up to torch 2.12, where one that draws and must not raises."""
    seen: list[bool] = []
    original = case.recorder.capture

    def capture(run_kernels: Callable[[list[Any]], Any], *arguments: Any, **options: Any) -> Capture:
        seen.append(options["may_draw"])
        made = original(run_kernels, *arguments, **options)
        if not options["may_draw"] and case.recorder.recordings[-1].drawn:
            made.discard(case.recorder.driver)
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        return made

    monkeypatch.setattr(case.recorder, "capture", capture)
    monkeypatch.setattr(torch_private, "graphs_share_random_state", lambda: True)
    return seen


def test_a_graph_that_draws_nothing_is_captured_so(case: Case, captures: list[bool]) -> None:
    run = case.made(add, DRAWS_NOTHING)
    for _ in range(4):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert set(captures) == {False}
    case.expect(captured=1)


def test_one_that_draws_against_expectation_is_captured_again(case: Case, captures: list[bool]) -> None:
    run = case.made(draw, DRAWS_NOTHING)
    for _ in range(4):
        run([case.floats(1), case.floats(2)])

    assert captures[:2] == [False, True]
    assert captures.count(False) == 1  # from then on that is known
    case.expect(captured=1)


def test_other_errors_do_not_count_as_drawing(
    case: Case, captures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that needs memory of its own, and an error that a capture meets whether or not it may draw."""
    run = case.made(add, DRAWS_NOTHING)
    run([case.floats(1), case.floats(2)])
    original, errors = case.recorder.capture, [AddressesError(), RuntimeError("a"), RuntimeError("b")]

    def capture(*arguments: Any, **options: Any) -> Capture:
        made = original(*arguments, **options)
        if errors and not (isinstance(errors[0], AddressesError) and options["addresses"] is None):
            made.discard(case.recorder.driver)
            raise errors.pop(0)
        return made

    monkeypatch.setattr(case.recorder, "capture", capture)
    monkeypatch.setattr(case.recorder, "addresses_for_capture", lambda: 1 << 21)
    run([case.floats(1), case.floats(2)])

    assert captures == [False, False, True]
    assert not run._pipeline._may_draw


def test_a_graph_that_needs_memory_of_its_own_does_not_count_as_drawing(
    case: Case, captures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operator raises an error of its own where there are addresses only."""
    run = case.made(add, DRAWS_NOTHING)
    run([case.floats(1), case.floats(2)])
    original = case.recorder.capture

    def capture(*arguments: Any, **options: Any) -> Capture:
        made = original(*arguments, **options)
        if options["addresses"] is not None:
            made.discard(case.recorder.driver)
            raise RuntimeError("there is no memory here")
        return made

    monkeypatch.setattr(case.recorder, "capture", capture)
    monkeypatch.setattr(case.recorder, "addresses_for_capture", lambda: 1 << 21)
    run([case.floats(1), case.floats(2)])

    assert captures == [False, True, True]
    assert not run._pipeline._may_draw
    case.expect(captured=1)


def test_from_torch_2_13_on_all_captures_may_draw(
    case: Case, captures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "graphs_share_random_state", lambda: False)
    run = case.made(add, DRAWS_NOTHING)
    for _ in range(3):
        run([case.floats(1), case.floats(2)])

    assert set(captures) == {True}


def test_what_other_threads_draw_while_a_graph_that_draws_nothing_is_verified_is_not_drawn_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pygraphd.client.replay.replay import Replay

    run, generator, drawn = case.made(add, DRAWS_NOTHING), case.recorder.generator, list[int]()
    original = Replay.serve_on

    def run_beside(replay: Replay, *arguments: Any) -> Any:
        outputs = original(replay, *arguments)
        drawn.append(generator.offset)
        generator.offset += 4
        return outputs

    run([case.floats(1), case.floats(2)])
    with monkeypatch.context() as patch:
        patch.setattr(Replay, "serve_on", run_beside)
        run([case.floats(1), case.floats(2)])
    run([case.floats(1), case.floats(2)])

    assert drawn
    assert generator.offset == drawn[-1] + 4
    case.expect(captured=1)
