"""Now and then, whether a GRAPH that serves still computes what its kernels do when they are launched.

The call has the graph's results, as every call has. Beside it the callable is launched twice on copies of the inputs: once to be
held against the graph, and once to see how much it differs from itself. What that comes to is read at a later call.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.common import log
from pygraphd.client.common.guard import guarded
from pygraphd.client.recording.comparison import (
    Kind,
    Values,
    distance,
    form,
    form_of,
    kind,
    tolerance_of,
    too_far,
)
from pygraphd.client.recording.stand_ins import bytes_to_copy, copies_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.pipeline import Recorder
    from pygraphd.client.replay.replay import Replay

LOOK = 256
"""Calls between two looks at the clock."""
UNTIL_READ = 16
"""Calls until results are read: the GPU has come that far by then, so that it is hardly waited for."""
NEVER = sys.maxsize
DIFFERS = "a GRAPH computed other results than its kernels, and runs as KERNELS from now on"


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a call that is checked, and copies of what they held before it."""

    inputs: list[Any]
    kept: list[Any]


@dataclass(frozen=True, slots=True)
class _Found:
    """How far a graph's results were from launched ones, and these from others, on the device; and what that is judged by."""

    numbers: torch.Tensor
    names: Mapping[int, str]
    kinds: Mapping[int, Kind]
    tolerance: float

    def difference(self) -> str | None:
        """Return what differs; waits for the device."""
        values: list[float] = self.numbers.tolist()
        mine = dict(zip(self.kinds, values[: len(self.kinds)], strict=True))
        noise = dict(zip(self.kinds, values[len(self.kinds) :], strict=True))
        far = too_far(mine, self.kinds, self.tolerance, noise)
        return self.names[far[0]] if far else None


class ResultCheck:
    """Checks the recordings of one callable, one of its calls in each interval."""

    def __init__(
        self,
        launch: Runnable,
        recorder: Recorder,
        report: Report,
        facts: GraphFacts,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check `launch` so; `interval_s` 0: never. Nor what may not run twice, or is told numbers of the host's."""
        self._launch = launch
        self._recorder = recorder
        self._report = report
        self._guarded = guarded(report, "checking results")
        self._undefined = facts.undefined
        self._interval_s = interval_s
        self._clock = clock
        self._is_on = interval_s > 0 and facts.is_repeatable and not facts.state
        self._due = clock() + interval_s
        self._found: weakref.WeakKeyDictionary[Replay, _Found] = weakref.WeakKeyDictionary()

    def first_look(self, replay: Replay) -> int:
        """Return how many calls of a new recording there are to be before it is looked at; those that draw random numbers never are."""
        return LOOK if self._is_on and not replay.draws else NEVER

    def verdict(self, replay: Replay) -> str | None:
        """Return why a recording is not to be used any more, as was found at an earlier call; raises nothing."""
        found = self._found.pop(replay, None)
        if found is None:
            return None
        difference = self._guarded(found.difference)
        if difference is None:
            return None
        self._report.count(wrong_results=1)
        reason = f"{DIFFERS} ({difference})"
        self._report.fail(reason)
        log.say(reason)
        return reason

    def begin(self, replay: Replay, inputs: Sequence[Any]) -> Given | None:
        """Return what is needed to check the call that comes now; None if it is not to be checked. Raises nothing."""
        replay.counts.look_at = replay.counts.replays + LOOK
        if self._clock() < self._due:
            return None
        self._due = self._clock() + self._interval_s
        with self._guarded:
            if self._recorder.why_not() is None and self._has_memory_for(replay, inputs):
                return Given(list(inputs), copies_of(inputs))
        return None

    def end(self, replay: Replay, given: Given, outputs: Sequence[Any]) -> None:
        """Launch the callable beside a call that has run; raises nothing."""
        with self._guarded:
            self._found[replay] = self._compared(given, outputs)
            self._recorder.trim()
            self._report.count(checked_results=1)
            replay.counts.look_at = replay.counts.replays + UNTIL_READ

    def _compared(self, given: Given, outputs: Sequence[Any]) -> _Found:
        copies = copies_of(given.kept)
        right = Values(self._launch(list(copies)), copies)
        again = Values(self._launch(list(given.kept)), given.kept)
        mine = Values(outputs, given.inputs)
        pairs = {
            index: (mine.all[index], each, again.all[index])
            for index, each in enumerate(right.all)
            if self._is_compared(index, mine.all[index], each)
        }
        numbers = [distance(one, other) for one, other, _ in pairs.values()]
        numbers += [distance(more, other) for _, other, more in pairs.values()]
        return _Found(
            torch.stack(numbers) if numbers else torch.empty(0),
            {index: right.name(index) for index in pairs},
            {index: kind(other) for index, (_, other, _) in pairs.items()},
            tolerance_of(right.all),
        )

    def _is_compared(self, index: int, mine: Any, right: Any) -> bool:
        if not isinstance(right, torch.Tensor) or not right.numel() or index in self._undefined:
            return False
        is_here = right.device == self._recorder.device
        return is_here and mine is not right and form_of(mine) == form(right)

    def _has_memory_for(self, replay: Replay, inputs: Sequence[Any]) -> bool:
        needed = 2 * bytes_to_copy(inputs) + 3 * sum(each.bytes for each in replay.memories)
        return 2 * needed <= self._recorder.free_bytes()
