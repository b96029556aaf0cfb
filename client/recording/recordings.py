"""A compiled callable that runs as relocatable graphs: what is recorded, verified, kept, bounded, and when it is launched.

There is one recording for each set of integer inputs (dynamic sizes) that comes back. Whatever cannot be recorded or does not
fit a call is launched, and counted with its reason.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import UnfitError
from pygraphd.client.recording.layout_mismatch import Misfits
from pygraphd.client.recording.pipeline import Attempts, Failure
from pygraphd.client.recording.refusals import Disagreements, Lasts, Refusals
from pygraphd.client.recording.result_check import ResultCheck
from pygraphd.client.replay.native.ffi import helper

if TYPE_CHECKING:
    from pygraphd.client.backend.errors import Misfit
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.pipeline import Attempt, Costs, Recorder
    from pygraphd.client.replay.replay import Replay
    from pygraphd.client.replay.rng import Draw

MAX_RECORDINGS = 8
"""Recordings of one callable, if nobody says otherwise; the one that was not used for longest goes first."""
CAPTURES_OF_EACH = 4
"""Times that bound is how often a callable is captured in all: sizes that take turns must not be recorded for ever."""
MAX_CAPTURES = CAPTURES_OF_EACH * MAX_RECORDINGS
MAX_SIZES = 64
"""Sets of integer inputs that are remembered, whether or not they were recorded; others are launched."""

NOT_YET = "sizes that had not come back yet"
HELPER_IS_COMING = "the compiled helper was still being compiled"
TOO_MANY_SIZES = "more sizes than are remembered"
TOO_MANY_CAPTURES = "recorded too often"
IN_A_CAPTURE = "called within a capture of the user's"
BEING_RECORDED = "called from another thread while it was recorded"
NO_MEMORY = "out of memory in a replay"
SEEN_BY_HOOKS = "hooks see what is saved for the backward, which shares storages since no hooks saw it when it was recorded"


class Relocatable:
    """Runs a compiled callable as relocatable graphs where it can; call it with Inductor's list of inputs."""

    _hears_of_draws = False
    _asks_of_captures = True
    """Whether it has to be asked if a call that can be replayed is a part of a capture of the user's."""

    def __init__(
        self,
        launch: Runnable,
        recorder: Recorder,
        report: Report,
        facts: GraphFacts = GraphFacts(),  # noqa: B008 - it is frozen
        max_recordings: int = MAX_RECORDINGS,
        recheck_s: float = 0.0,
    ) -> None:
        """Run `launch` so; `recheck_s`: how often its results are checked, in seconds; 0: never."""
        self._check = ResultCheck(launch, recorder, report, facts, recheck_s)
        self._max_recordings = max_recordings
        self._launch = launch
        self.facts = facts
        """What is known of it beforehand."""
        self._recorder = recorder
        self._attempts = Attempts(launch, recorder, report, facts)
        self._report = report
        self._replays: dict[tuple[int, ...], Replay] = {}
        self._nodes: dict[tuple[int, ...], int] = {}
        self._refused = Refusals()
        self._disagreements = Disagreements()
        self._misfits = Misfits()
        self._seen: set[tuple[int, ...]] = set()
        self._latest: tuple[int, ...] | None = None
        self._integers: list[int] | None = None  # which inputs are integers is the same at every call
        self._put_off = 0
        self._recording = threading.Lock()
        self._changing = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        on_device = self._recorder.on_device()
        if on_device is None:
            return self._run(inputs)
        with on_device:
            return self._run(inputs)

    def _run(self, inputs: list[Any]) -> Any:
        sizes = self._sizes_of(inputs)
        replay = self._replays.get(sizes)
        if replay is None:
            return self._without_replay(sizes, inputs)
        if self._asks_of_captures and self._recorder.in_capture():
            return self._step_aside(IN_A_CAPTURE, inputs)
        if replay.layout.saves_together and torch_private.saves_by_hooks():
            return self._step_aside(SEEN_BY_HOOKS, inputs)
        if replay.counts.replays >= replay.look_at:
            return self._looked_at(sizes, replay, inputs)
        return self._replay(sizes, replay, inputs)

    def _looked_at(self, sizes: tuple[int, ...], replay: Replay, inputs: list[Any]) -> Any:
        """Run a call at which it may be time to check results."""
        if reason := self._check.verdict(replay):
            self._drop(sizes)
            self._refused.add(sizes, reason, Lasts.IN_THIS_PROCESS)
            return self._step_aside(reason, inputs)
        given = self._check.begin(replay, inputs)
        outputs = self._replay(sizes, replay, inputs)
        if given is not None:
            self._check.end(replay, given, outputs)
        return outputs

    def _replay(self, sizes: tuple[int, ...], replay: Replay, inputs: list[Any]) -> Any:
        reason = misfit = None
        try:
            outputs, drawn = replay.drawing(inputs)
        except UnfitError as error:
            reason, misfit = str(error), error.misfit
        except torch.OutOfMemoryError:
            reason = NO_MEMORY
        except DriverError as error:
            reason = str(error)
            self._drop(sizes)
            self._refused.add(sizes, reason, Lasts.IN_THIS_PROCESS)
        if reason is not None:
            # Not within `except`: the error's traceback keeps what was allocated for the replay.
            return self._otherwise(sizes, inputs, reason, misfit)
        if sizes != self._latest:
            self._note_use(sizes)
        if self._hears_of_draws:
            self._drew(replay, outputs, drawn)
        return outputs

    def _sizes_of(self, inputs: list[Any]) -> tuple[int, ...]:
        integers = self._integers
        if integers is None:
            integers = self._integers = [index for index, value in enumerate(inputs) if type(value) is int]
        return tuple([inputs[index] for index in integers]) if integers else ()

    def _drew(self, replay: Replay, outputs: Any, drawn: Draw | None) -> None:
        """Note what random numbers a replay was given, if `_hears_of_draws`."""

    @property
    def refusal(self) -> str | None:
        """Why no call so far could be recorded; None if one could, or none was tried."""
        if self._replays:
            return None
        return self._refused.first or (TOO_MANY_CAPTURES if self._has_used_up_captures() else None)

    @property
    def refused_for_good(self) -> bool:
        """Whether that lies in the graph itself, and will be so in the next process."""
        return self.refusal is not None and self.lies_in_the_graph(self.refusal)

    @property
    def prepared(self) -> int:
        """How many recordings and executables were made, or put off: a call that has changed it has done what later calls need not do."""
        made = sum(replay.executables for replay in list(self._replays.values()))
        return self._attempts.captures + self._put_off + made

    def at(self, sizes: tuple[int, ...]) -> OfSizes:
        """Return what this is for one set of integer inputs; closing it lets go of their recording alone."""
        return OfSizes(self, sizes)

    def refusal_at(self, sizes: tuple[int, ...]) -> str | None:
        """Return why these sizes could not be recorded, or will not be; None if they are, or may be."""
        if sizes in self._replays:
            return None
        return self._refused.of(sizes) or self._why_no_more(sizes)

    def lies_in_the_graph(self, refusal: str) -> bool:
        """Whether what was refused for this reason will be so in the next process, too."""
        is_bound = refusal in {TOO_MANY_SIZES, TOO_MANY_CAPTURES}
        return not is_bound and self._refused.lasts(refusal) is Lasts.IN_THE_GRAPH

    def is_for_now(self, refusal: str) -> bool:
        """Whether what was refused for this reason may not be so at any time."""
        return self._refused.lasts(refusal) is Lasts.FOR_NOW

    def let_go_at(self, sizes: tuple[int, ...]) -> None:
        """Let go of the recording for some sizes, if there is one, and of having seen them."""
        self._drop(sizes)
        self._seen.discard(sizes)

    @property
    def costs(self) -> Costs | None:
        """What making the latest recording came to."""
        return self._attempts.costs

    @property
    def recordings(self) -> int:
        """How many recordings there are."""
        return len(self._replays)

    @property
    def replays(self) -> tuple[Replay, ...]:
        """What there is of each recording; the one that was used last is the last."""
        return tuple(self._replays.values())

    def close(self) -> None:
        """Let go of all recordings."""
        while self._replays:
            self._drop(next(iter(self._replays)))

    # --- launching instead ---

    def _step_aside(self, reason: str, inputs: list[Any]) -> Any:
        self._report.step_aside(reason)
        self._attempts.note_launch()
        return self._launch(inputs)

    def _without_replay(self, sizes: tuple[int, ...], inputs: list[Any]) -> Any:
        reason = self._why_not_record(sizes)
        if reason is not None:
            return self._step_aside(reason, inputs)
        if not self._recording.acquire(blocking=False):
            return self._step_aside(BEING_RECORDED, inputs)
        try:
            return self._record(sizes, inputs)
        finally:
            self._recording.release()

    def _otherwise(
        self, sizes: tuple[int, ...], inputs: list[Any], reason: str, misfit: Misfit | None
    ) -> Any:
        """Run a call that its recording does not fit; such calls that come again are recorded so that it does."""
        is_due = misfit is not None and self._misfits.note(sizes, inputs, misfit)
        if not is_due or self._why_no_more(sizes) or not self._recording.acquire(blocking=False):
            return self._step_aside(reason, inputs)
        try:
            return self._record(sizes, inputs)
        finally:
            self._recording.release()

    def _why_not_record(self, sizes: tuple[int, ...]) -> str | None:
        refused = self._refused.of(sizes)
        if refused is not None:
            if not self._may_be_over(sizes, refused):
                return refused
            self._refused.drop(sizes)
        if reason := self._why_no_more(sizes):
            return reason
        if sizes not in self._seen:
            self._seen.add(sizes)
            return NOT_YET
        if helper.is_coming():
            self._put_off += 1
            return HELPER_IS_COMING
        return IN_A_CAPTURE if self._recorder.in_capture() else None

    def _may_be_over(self, sizes: tuple[int, ...], refused: str) -> bool:
        if not self.is_for_now(refused) or self._recorder.in_capture():
            return False
        if refused in self._attempts.of_recorder:
            return self._recorder.why_not() is None
        return self._refused.is_due(sizes)

    def _why_no_more(self, sizes: tuple[int, ...]) -> str | None:
        if sizes not in self._seen and len(self._seen) >= max(
            MAX_SIZES, CAPTURES_OF_EACH * self._max_recordings
        ):
            return TOO_MANY_SIZES
        return TOO_MANY_CAPTURES if self._has_used_up_captures() else None

    def _has_used_up_captures(self) -> bool:
        return self._attempts.captures >= CAPTURES_OF_EACH * self._max_recordings

    # --- recording ---

    def _record(self, sizes: tuple[int, ...], inputs: list[Any]) -> Any:
        attempt = self._attempts.begin(
            inputs,
            self._disagreements.staged(sizes),
            self._misfits.leeway(sizes),
            is_doubted=self._disagreements.is_doubted(sizes),
        )
        if isinstance(attempt, Failure):
            self._note_failure(sizes, attempt)
            self._attempts.note_launch()
            return self._launch(inputs)
        # The launched call is to take what recording had, and not more of the device beside it.
        self.trim()
        try:
            outputs = self._launch(inputs)
        except BaseException:
            attempt.close()
            raise  # the user's own, as without us
        found = self._attempts.end(attempt, outputs)
        if found is None:
            self._disagreements.forget(sizes)
            self._keep(sizes, attempt)
            return outputs
        attempt.close()
        if not isinstance(found, Failure):
            found = Failure(str(found), self._disagreements.add(sizes, found, attempt.unseen))
        self._note_failure(sizes, found)
        return outputs

    def _note_failure(self, sizes: tuple[int, ...], failure: Failure) -> None:
        self._report.step_aside(failure.reason)
        if failure.lasts is not None:
            self._refused.add(sizes, failure.reason, failure.lasts)

    def _keep(self, sizes: tuple[int, ...], attempt: Attempt) -> None:
        replay = attempt.keep()
        replay.look_at = self._check.first_look(replay)
        with self._changing:
            before = self._replays.pop(sizes, None)
            self._replays[sizes] = replay
            self._latest = sizes
            nodes, known = attempt.nodes, self._nodes.get(sizes, 0)
            self._nodes[sizes] = nodes
        self._report.note_nodes(nodes - known)
        self.trim()
        self._report.count(captured=1, staged=attempt.staged)
        if before is not None:
            before.close()
        if len(self._replays) > self._max_recordings:
            self._drop(next(iter(self._replays)))

    def trim(self) -> None:
        """Give back what launching has left: memory that is free, and the workspaces of BLAS libraries. Raises nothing."""
        try:
            with self._report.recording():
                self._recorder.trim()
        except Exception as error:  # noqa: BLE001 - one of CUDA's, which is the user's to meet in a call of theirs
            self._report.fail(f"giving memory back: {type(error).__name__}")

    def _drop(self, sizes: tuple[int, ...]) -> None:
        with self._changing:
            replay = self._replays.pop(sizes, None)
            nodes = self._nodes.pop(sizes, 0)
        if replay is not None:
            replay.close()
            self._report.note_nodes(-nodes)

    def _note_use(self, sizes: tuple[int, ...]) -> None:
        with self._changing:
            replay = self._replays.pop(sizes, None)
            if replay is not None:
                self._replays[sizes] = replay
            self._latest = sizes


@dataclass(frozen=True, slots=True)
class OfSizes:
    """A `Relocatable` as those see it who call it with one set of integer inputs only."""

    whole: Relocatable
    sizes: tuple[int, ...]

    def __call__(self, inputs: list[Any]) -> Any:
        """Run on Inductor's list of inputs."""
        return self.whole(inputs)

    @property
    def refusal(self) -> str | None:
        """Why these sizes could not be recorded."""
        return self.whole.refusal_at(self.sizes)

    @property
    def refused_for_good(self) -> bool:
        """Whether that lies in the graph itself, and will be so in the next process."""
        return self.refusal is not None and self.whole.lies_in_the_graph(self.refusal)

    @property
    def prepared(self) -> int:
        """How many recordings and executables were made, for whichever sizes."""
        return self.whole.prepared

    def at(self, sizes: tuple[int, ...]) -> OfSizes:
        """Return the same for other sizes."""
        return OfSizes(self.whole, sizes)

    def trim(self) -> None:
        """Give back what launching has left."""
        self.whole.trim()

    def close(self) -> None:
        """Let go of their recording."""
        self.whole.let_go_at(self.sizes)
