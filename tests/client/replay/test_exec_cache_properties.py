"""The executable table under any sequence of calls: results are right, and the table keeps its rules."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.backend.errors import FallbackError
from pygraphd.client.replay import exec_cache
from pygraphd.client.replay.exec_cache import WORTH
from tests.support.recorder import Recorder

if TYPE_CHECKING:
    from pygraphd.client.replay.replay import Replay
    from tests.support.emulator import Allocator, Emulator

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


class Model:
    """The executables of a graph, each as what its nodes refer to, and the rules by which one is picked."""

    def __init__(self, nodes: int, most: int, idle: int, worth: int) -> None:
        self.bound: list[tuple[object, ...]] = [(None,) * nodes]
        self._used = [0]
        self._seen: set[tuple[object, ...]] = set()
        self._most, self._idle, self._worth = most, idle, worth
        self._calls = 0

    def written(self, now: tuple[object, ...], *, fits: bool) -> int:
        """Return how many nodes are written for a call whose nodes refer to `now`."""
        self._calls += 1
        if not fits:
            return 0
        picked, written = (self.bound.index(now), 0) if now in self.bound else self._rebound(now)
        self.bound[picked], self._used[picked] = now, self._calls
        return written

    def _rebound(self, now: tuple[object, ...]) -> tuple[int, int]:
        picked, written = 0, self._differ(0, now)
        if now in self._seen and written >= self._worth:
            if len(self.bound) < self._most:
                self.bound.append(now)
                self._used.append(0)
                return len(self.bound) - 1, written
            oldest = min(range(1, len(self.bound)), key=self._used.__getitem__, default=0)
            picked = oldest if self._calls - self._used[oldest] > self._idle else 0
            written = self._differ(picked, now)
        self._seen.add(now)
        return picked, written

    def _differ(self, executable: int, now: tuple[object, ...]) -> int:
        return sum(each != at for each, at in zip(now, self.bound[executable], strict=True))


CALL = st.tuples(
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(0, 2),
    st.sampled_from(["fits"] * 6 + ["apart", "misaligned"]),
)
"""Where an input lies, and two that overlap; which memory the call has; and whether it fits."""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    calls=st.lists(CALL, min_size=1, max_size=40),
    times=st.integers(1, 6),
    nodes=st.sampled_from([2, 2 * WORTH]),
    idle=st.sampled_from([3, 256]),
    most=st.integers(1, 5),
    worth=st.sampled_from([1, WORTH]),
)
def test_whatever_comes_results_are_right_and_the_table_keeps_its_rules(
    emulator: Emulator,
    allocator: Allocator,
    calls: list[Any],
    times: int,
    nodes: int,
    idle: int,
    most: int,
    worth: int,
) -> None:
    singles = [allocator.tensor(torch.rand(8)) for _ in range(7)]
    pairs = [allocator.tensor(torch.rand(16)) for _ in range(7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exec_cache, "IDLE_CALLS", idle)
        patch.setattr(exec_cache, "most_executables", lambda _: most)
        patch.setattr(exec_cache, "least_to_write", lambda _: worth)
        replay = _summing(emulator, allocator, nodes)
    model, memories = Model(nodes, most, idle, worth), [replay.memory() for _ in range(3)]
    for first, second, memory, kind in calls * times:
        inputs = [singles[first], *_overlapping(pairs[second])]
        if kind == "apart":
            inputs[2] = _overlapping(pairs[(second + 1) % 7])[1]
        if kind == "misaligned":
            inputs[0] = pairs[second][1:9]
        before = replay.counts.written
        _run(replay, inputs, memories[memory], fits=kind == "fits")
        referred = tuple((second, memory) if node % 2 else (first, second, memory) for node in range(nodes))
        assert replay.counts.written - before == model.written(referred, fits=kind == "fits")
        assert replay.executables == len(model.bound) <= most
    replay.close()
    allocator.check()


def _overlapping(memory: torch.Tensor) -> list[torch.Tensor]:
    return [memory[:8], memory[4:12]]


def _summing(emulator: Emulator, allocator: Allocator, nodes: int) -> Replay:
    """Record a graph that adds the third input, which overlaps the second one, to the first one and to the second one in turn."""
    recorder = Recorder(emulator, allocator)
    recorded = [allocator.tensor(torch.rand(8)), *_overlapping(allocator.tensor(torch.rand(16)))]
    outputs = [recorder.arena.allocate(8) for _ in range(nodes)]
    for number, output in enumerate(outputs):
        recorder.graph.add(recorded[number % 2], recorded[2], output)
    replay = recorder.built(recorded, outputs).replay
    assert recorder.notes == []
    return replay


def _run(replay: Replay, inputs: list[torch.Tensor], memory: list[torch.Tensor], *, fits: bool) -> None:
    for each in memory:
        each.zero_()
    if not fits:
        with pytest.raises(FallbackError):
            replay.serve_on(list(inputs), memory)
        return
    for number, result in enumerate(replay.serve_on(list(inputs), memory)):
        assert torch.equal(result, inputs[number % 2] + inputs[2])
