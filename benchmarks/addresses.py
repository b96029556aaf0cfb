"""Steps whose addresses stay, or alternate in the ways that are common: how much longer do those take?

A step that the host bounds varies by several percent within a process. So each window of steps is held against one of
the same round, a fraction of a second away, and it is the ratio of the two that is summed up.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.figures import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.cores import Cores
    from benchmarks.step import Step

ROUNDS = 24
SKIPPED = 2
"""Rounds before them: graphs get executables for the addresses that come back."""
WINDOW_STEPS = 10
UNTIMED = 3
"""Windows after a change of addresses, before the one that is timed: executables that are not used go to others after a while."""
HELD_AGAINST = {
    "fixed_again": "fixed",
    "keeping_two_outputs": "fixed",
    "four_batches_in_rotation": "fixed",
    "micro_batches_one_after_the_other": "micro_batches_of_one_place",
    "micro_batches_in_flight": "micro_batches_of_one_place",
}
"""What does the same work with fixed addresses."""


class Addresses:
    """Windows of steps on four batches; each method is one way for addresses to be."""

    def __init__(self, step: Step, batches: Sequence[Any], cores: Cores) -> None:
        self._step = step
        self._cores = cores
        self._batches = batches
        self._kept: list[Any] = []

    def fixed(self) -> None:
        """Run on one batch."""
        for _ in range(WINDOW_STEPS):
            self._step(self._batches[0])

    def fixed_again(self) -> None:
        """Run on one batch: what this differs from `fixed` by is noise."""
        self.fixed()

    def keeping_two_outputs(self) -> None:
        """Hold each output or loss until the step after the next."""
        for _ in range(WINDOW_STEPS):
            self._kept.append(self._step(self._batches[0]))
            del self._kept[:-2]

    def four_batches_in_rotation(self) -> None:
        """Run on batches that lie in four places."""
        for number in range(WINDOW_STEPS):
            self._step(self._batches[number % 4])

    def micro_batches_of_one_place(self) -> None:
        """Add up the gradients of one batch, twice."""
        self._one_after_the_other(self._batches[0], self._batches[0])

    def micro_batches_one_after_the_other(self) -> None:
        """Add up the gradients of two."""
        self._one_after_the_other(*self._batches[:2])

    def _one_after_the_other(self, *batches: Any) -> None:
        for _ in range(WINDOW_STEPS // 2):
            for batch in batches:
                self._step.evaluate(batch)
            self._step.update()

    def micro_batches_in_flight(self) -> None:
        """Do both forwards before the first backward."""
        for _ in range(WINDOW_STEPS // 2):
            losses = [self._step.forward(batch) for batch in self._batches[:2]]
            for loss in losses:
                loss.backward()
            self._step.update()

    def ways(self, *, training: bool, may_overlap: bool) -> list[Callable[[], None]]:
        """Return those that a workload can be run in; `may_overlap`: a forward's outputs outlast the next forward."""
        ways = [self.fixed, self.fixed_again, self.keeping_two_outputs, self.four_batches_in_rotation]
        if training:
            ways += [self.micro_batches_of_one_place, self.micro_batches_one_after_the_other]
        if training and may_overlap:
            ways.append(self.micro_batches_in_flight)
        return ways

    def rounds(self, ways: Sequence[Callable[[], None]]) -> list[dict[str, float]]:
        """Return the ms that a step took in each of these methods, round by round."""
        rounds = []
        for number in range(SKIPPED + ROUNDS):
            first = number % len(ways)  # none has the same neighbour always
            rounds.append({way.__name__: self._step_ms(way) for way in (*ways[first:], *ways[:first])})
        return rounds[SKIPPED:]

    def _step_ms(self, way: Callable[[], None]) -> float:
        for _ in range(UNTIMED):
            way()
        return self._cores.undisturbed(functools.partial(_elapsed_ms, way)) / WINDOW_STEPS


def step_ms(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the figure of each way."""
    return _figures({name: [each[name] for each in rounds] for name in rounds[0]})


def beyond_fixed(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return by which share a step takes longer than with fixed addresses in the same round, for each way that alternates."""
    return _figures(
        {
            name: [each[name] / each[base] - 1 for each in rounds]
            for name, base in HELD_AGAINST.items()
            if name in rounds[0]
        }
    )


def _figures(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {name: dataclasses.asdict(figure) for name, each in samples.items() if (figure := summarize(each))}


def _elapsed_ms(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3
