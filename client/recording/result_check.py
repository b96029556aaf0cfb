"""Compares one call of each GRAPH with KERNELS every `PYGRAPH_RECHECK_S` seconds, in at most 0.1 % of the time of a device.

The call returns the results of the GRAPH. After it the callable runs twice as KERNELS on copies of the inputs: once to be compared with
the GRAPH, and once to find out how much it differs from itself. The outcome is read at a later call.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.common import log
from pygraphd.client.common.guard import guarded
from pygraphd.client.recording.alias_sets import InputGroups, input_groups
from pygraphd.client.recording.comparison import ComparedTensor, Values, distance, form, tolerance_of, too_far
from pygraphd.client.recording.stand_ins import bytes_to_copy, copies_of

if TYPE_CHECKING:
    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.capture import CudaRecorder
    from pygraphd.client.replay.replay import Replay

CALLS_PER_POLL = 256
"""Calls of a recording between two readings of the clock."""
CALLS_UNTIL_READ = 16
"""Calls between a check and the reading of its outcome. By then the GPU has mostly computed it, so that the host does not wait."""
SHARE = 0.0005
"""Largest share of the time that all checks on a device take. As much again is left for their consequences: memory that was given back to the
device is allocated anew."""
PRESUMED_S = 0.01
"""Estimate of the time in seconds that a check takes, used until its outcome is read."""
NEVER = sys.maxsize
DIFFERS = "a GRAPH computed other results than its kernels, and runs as KERNELS from now on"


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """The inputs of a call that is checked."""

    inputs: list[Any]
    copies: list[Any]
    """The inputs with their values from before the call: copies of those that the graph may write."""
    began_s: float
    start: Any
    """The event on the device at the start."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a check, on the device."""

    numbers: torch.Tensor
    """The distance of each value from KERNELS, followed by the distance of KERNELS from a second run."""
    names: Mapping[int, str]
    compared: Mapping[int, ComparedTensor]
    tolerance: float
    events: tuple[Any, Any]
    """The events on the device at the start and at the end."""

    def difference(self) -> str | None:
        """Return the name of a value that differs; None if none does. Waits for the device."""
        self.events[1].synchronize()  # the call that reads may be on another stream
        values: list[float] = self.numbers.tolist()
        mine = dict(zip(self.compared, values[: len(self.compared)], strict=True))
        noise = dict(zip(self.compared, values[len(self.compared) :], strict=True))
        far = too_far(mine, self.compared, self.tolerance, noise)
        return self.names[far[0]] if far else None


class ResultCheck:
    """Checks the recordings of one callable, one call in each interval."""

    def __init__(
        self,
        run_kernels: Runnable,
        recorder: CudaRecorder,
        report: Report,
        facts: GraphFacts,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compare every `interval_s` seconds (0: never), but nothing that must not run twice, or that takes RNG state from the host."""
        self._run_kernels = run_kernels
        self._recorder = recorder
        self._report = report
        self._guarded = guarded(report, "checking results")
        self._undefined, self._written = facts.undefined, facts.written
        self._interval_s = interval_s
        self._clock = clock
        self._is_on = interval_s > 0 and facts.is_repeatable and not facts.state
        self._due = clock() + interval_s
        # Weak: a recording that is dropped closes itself, and takes an outcome that nobody reads along.
        self._outcomes: weakref.WeakKeyDictionary[Replay, _Outcome] = weakref.WeakKeyDictionary()

    def first_poll(self, replay: Replay) -> int:
        """Return the call of a new recording at which to read the clock; never if it draws random numbers."""
        return CALLS_PER_POLL if self._is_on and not replay.draws else NEVER

    def verdict(self, replay: Replay) -> str | None:
        """Return why a recording must not serve any more, by the check of an earlier call; None if it may. Raises nothing."""
        # To be read later where `torch.cuda.set_sync_debug_mode` reports waits for the device.
        if torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode():
            return None
        outcome = self._outcomes.pop(replay, None)
        if outcome is None:
            return None
        difference = self._guarded(lambda: self._read(outcome))
        if difference is None:
            return None
        self._report.count(wrong_results=1)
        reason = f"{DIFFERS} ({difference})"
        self._report.count_failure(reason)
        log.say(reason, is_logged=True)
        return reason

    def _read(self, outcome: _Outcome) -> str | None:
        began_s = self._clock()
        difference = outcome.difference()
        self._pause(max(self._clock() - began_s, outcome.events[0].elapsed_time(outcome.events[1]) / 1e3))
        return difference

    def _pause(self, took_s: float) -> None:
        """Let no check begin on the device until the time that one took is a small share of all; then other recordings are checked first."""
        recorder = self._recorder
        recorder.next_check_at = max(recorder.next_check_at, self._clock() + took_s / SHARE)
        self._due = recorder.next_check_at + self._interval_s

    def begin(self, replay: Replay, inputs: Sequence[Any]) -> CheckedCall | None:
        """Return the inputs for a check of the next call; None if that is not to be checked. Raises nothing."""
        # Whatever follows: until then the helper serves the calls by itself again.
        replay.counts.next_check = replay.counts.replays + CALLS_PER_POLL
        began_s = self._clock()
        if torch_private.is_profiled() or began_s < max(self._due, self._recorder.next_check_at):
            return None  # a profile would show calls that are no part of the program
        self._due = began_s + self._interval_s
        with self._guarded:
            groups = input_groups(inputs)
            if self._recorder.why_not() is None and self._has_memory_for(replay, groups):
                start = self._recorder.mark()
                return CheckedCall(list(inputs), copies_of(inputs, groups, self._written), began_s, start)
        return None

    def end(self, replay: Replay, checked: CheckedCall, outputs: Sequence[Any]) -> None:
        """Run the callable as KERNELS after a call, and compare. Raises nothing."""
        with self._guarded:
            self._outcomes[replay] = self._compared(checked, outputs)
            took_s = self._clock() - checked.began_s
            self._recorder.trim()  # it may wait for other ranks, which is no time of the check
            self._report.count(checked_results=1)
            self._pause(max(took_s, PRESUMED_S))
            replay.counts.next_check = replay.counts.replays + CALLS_UNTIL_READ

    def _compared(self, checked: CheckedCall, outputs: Sequence[Any]) -> _Outcome:
        copies = copies_of(checked.copies, input_groups(checked.copies), self._written)
        # On lists of their own: Inductor's code clears the list of inputs that it is given.
        right = Values(self._run_kernels(list(copies)), copies)
        again = Values(self._run_kernels(list(checked.copies)), checked.copies)
        mine = Values(outputs, checked.inputs)
        pairs = {
            index: (mine.all[index], each, again.all[index])
            for index, each in enumerate(right.all)
            if self._is_compared(index, mine.all[index], each)
        }
        numbers = [distance(one, other) for one, other, _ in pairs.values()]
        numbers += [distance(more, other) for _, other, more in pairs.values()]
        return _Outcome(
            torch.stack(numbers) if numbers else torch.empty(0),
            {index: right.name(index) for index in pairs},
            {index: ComparedTensor(other.dtype, other.numel()) for index, (_, other, _) in pairs.items()},
            tolerance_of(right.all),
            (checked.start, self._recorder.mark()),
        )

    def _is_compared(self, index: int, mine: Any, right: Any) -> bool:
        if not isinstance(right, torch.Tensor) or not right.numel() or index in self._undefined:
            return False
        is_here = right.device == self._recorder.device
        return is_here and mine is not right and form(mine) == form(right)

    def _has_memory_for(self, replay: Replay, groups: InputGroups) -> bool:
        copies = bytes_to_copy(groups, self._written)
        # Copies for two runs as KERNELS, and the memory of these and of the GRAPH's call.
        needed = 2 * copies + 3 * sum(each.bytes for each in replay.layout.memories)
        return 2 * needed <= self._recorder.free_bytes()
