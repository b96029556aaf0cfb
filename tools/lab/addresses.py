"""Steps whose addresses stay, or alternate in the ways that are common: how much longer do those take?

A step that the host bounds varies by several percent within a process. So each window of steps is held against one of
the same round, a fraction of a second away, and it is the ratio of the two that is summed up. And as all that is not a call of a compiled
region does the same wherever its inputs lie, what these calls take of the host's time is held against that, too, which varies by much less.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.figures import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.conditions import Conditions
    from benchmarks.step import Step

ROUNDS = 24
SKIPPED = 2
"""Rounds before them: graphs get executables for the addresses that come back."""
WINDOW_STEPS = 10
UNTIMED = 3
"""Windows after a change of addresses, before the one that is timed: executables that are not used go to others after a while."""
# Micro-batches update the weights half as often as other steps, and so have a way with fixed addresses of
# their own.
HELD_AGAINST = {
    "fixed_again": "fixed",
    "keeping_two_outputs": "fixed",
    "four_batches_in_rotation": "fixed",
    "micro_batches_one_after_the_other": "micro_batches_of_one_place",
    "micro_batches_in_flight": "micro_batches_of_one_place",
}
"""For each way with alternating addresses, the way that does the same work with fixed ones."""


@dataclass(frozen=True, slots=True)
class Window:
    """Times of a step in a window: the whole step, and the host's time in calls of compiled regions."""

    step_ms: float
    regions_us: float


Round = Mapping[str, Window]
"""A window of each way, by its name."""


class Addresses:
    """Windows of steps on four batches; each method is one way for addresses to be."""

    def __init__(
        self, step: Step, batches: Sequence[Any], conditions: Conditions, regions_us: Callable[[], float]
    ) -> None:
        """`regions_us` returns the host's time in calls of compiled regions so far."""
        self._step = step
        self._conditions = conditions
        self._regions_us = regions_us
        self._batches = batches
        self._kept: list[Any] = []

    def fixed(self) -> None:
        """Run on one batch."""
        for _ in range(WINDOW_STEPS):
            self._step(self._batches[0])

    def fixed_again(self) -> None:
        """Run on one batch once more: the difference to `fixed` is noise."""
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
            # Inference has no gradients to add up.
            ways += [self.micro_batches_of_one_place, self.micro_batches_one_after_the_other]
        if training and may_overlap:
            ways.append(self.micro_batches_in_flight)
        return ways

    def rounds(self, ways: Sequence[Callable[[], None]]) -> list[Round]:
        """Return a window of each of these methods, round by round."""
        rounds: list[Round] = []
        for number in range(SKIPPED + ROUNDS):
            first = number % len(ways)  # none has the same neighbour always
            rounds.append({way.__name__: self._window(way) for way in (*ways[first:], *ways[:first])})
        return rounds[SKIPPED:]

    def _window(self, way: Callable[[], None]) -> Window:
        for _ in range(UNTIMED):
            way()
        return self._conditions.timed(functools.partial(self._timed, way))

    def _timed(self, way: Callable[[], None]) -> Window:
        torch.cuda.synchronize()
        before, began = self._regions_us(), time.perf_counter()
        way()
        torch.cuda.synchronize()  # a backward runs on a thread of its own, but the loss waits for it
        elapsed_ms = (time.perf_counter() - began) * 1e3
        return Window(elapsed_ms / WINDOW_STEPS, (self._regions_us() - before) / WINDOW_STEPS)


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the time of a step in each way, and the extra time of alternating addresses as a share of a step."""
    held = {name: base for name, base in HELD_AGAINST.items() if name in rounds[0]}
    return {
        "addresses_ms": _figures({name: [each[name].step_ms for each in rounds] for name in rounds[0]}),
        "addresses_beyond_fixed": _figures(
            {
                name: [each[name].step_ms / each[base].step_ms - 1 for each in rounds]
                for name, base in held.items()
            }
        ),
        "addresses_regions_us": _figures(
            {name: [each[name].regions_us for each in rounds] for name in rounds[0]}
        ),
        "addresses_regions_beyond_fixed": _figures(
            {
                name: [_regions_beyond(each[name], each[base]) for each in rounds]
                for name, base in held.items()
            }
        ),
    }


def _regions_beyond(window: Window, fixed: Window) -> float:
    # As a share of the whole step, like the figure of whole steps beside it.
    return (window.regions_us - fixed.regions_us) / (fixed.step_ms * 1e3)


def _figures(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {name: dataclasses.asdict(figure) for name, each in samples.items() if (figure := summarize(each))}
