"""Runs a compiled callable by its recordings: picks the one that serves a call, and makes one where there is none.

Each size (the values of a call's integer inputs) that comes back has its own. A call that none can serve runs as KERNELS: a fallback, with a reason.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import (
    IN_A_CAPTURE,
    PROFILED,
    FallbackError,
    LayoutMismatch,
    LayoutMismatchError,
)
from pygraphd.client.common.guard import guarded
from pygraphd.client.recording.call_conditions import CallConditions
from pygraphd.client.recording.pipeline import Attempt, Pipeline
from pygraphd.client.recording.recordings_by_size import RecordingsBySize
from pygraphd.client.recording.result_check import ResultCheck
from pygraphd.client.recording.size_slot import Persistence, Refusal, Size, SizeSlot
from pygraphd.client.replay.native.ffi import helper
from pygraphd.client.replay.replay import RECORDING_CLOSED, Replay, kernels_on_error
from pygraphd.client.replay.scratch import SharedScratch
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.capture import CudaRecorder
    from pygraphd.client.replay.rng import PhiloxRange

MAX_RECORDINGS = 8
"""The bound on recordings of one callable, unless `PYGRAPH_SIZES` is larger. Beyond it the least recently used recording is dropped."""

NOT_YET = "first call of a size"
BEING_RECORDED = "called from another thread while it was recorded"
NO_MEMORY = "out of memory in a replay"


def _seen_by_hooks(_: list[Any]) -> Any:
    raise LayoutMismatchError(LayoutMismatch.HOOKS)


class Recordings(RecordingsBySize):
    """Runs a compiled callable as GRAPH where it can; call it with Inductor's list of inputs."""

    run_kernels_or_record: Runnable | None = None
    """Runs calls as KERNELS in place of the callable itself; None: the callable runs them. See `CollectiveRecordings`."""
    _needs_draws = False
    """Whether `_note_draw` is called after each replay."""
    _checks_capture = True
    """Whether each call checks if the user is capturing the current stream, and then runs as KERNELS."""

    def __init__(
        self,
        run_kernels: Runnable,
        recorder: CudaRecorder,
        report: Report,
        facts: GraphFacts = GraphFacts(),  # noqa: B008 - it is frozen
        max_recordings: int = MAX_RECORDINGS,
        recheck_s: float = 0.0,
        note_failed_check: Callable[[Size, Reason], None] = lambda *_: None,
        scratch: SharedScratch | None = None,
    ) -> None:
        """Record `run_kernels`, the compiled callable; results are checked every `recheck_s` seconds (0: never).

        `note_failed_check` is called with the size of a recording that fails a check, and the reason. Recordings of one graph share `scratch`.
        """
        pipeline = Pipeline(run_kernels, recorder, report, facts)
        super().__init__(pipeline, recorder, report, facts, max_recordings, scratch or SharedScratch())
        self._run_kernels = run_kernels
        self._check = ResultCheck(run_kernels, recorder, report, facts, recheck_s)
        self._note_failed_check = note_failed_check
        self._conditions = CallConditions(facts)
        self._integers: list[int] = []
        """Indices of the integers among the inputs: the same at each call, and found at the first."""
        self._is_called = False
        self._recording = threading.Lock()
        """Held by the thread that records; others run KERNELS meanwhile."""

    @property
    def is_awaited(self) -> bool:
        """Whether a recording can only be made by calls of `run_kernels_or_record`, and there is none yet."""
        return False

    # --- a call ---

    @property
    def run(self) -> Runnable:
        """The callable for steady state: the helper, which calls this object where it cannot serve a call."""
        conditions = (*self._recorder.conditions, *self._conditions.for_helper)
        tangents = self._conditions.tangents
        return functools.partial(helper.ops.run, self._fused, self._integers, conditions, tangents, self)

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if (on_device := self._recorder.on_device()) is None:
            return self._run(inputs)
        with on_device:
            return self._run(inputs)

    def _run(self, inputs: list[Any]) -> Any:
        if reason := self._conditions.why_not(inputs):
            return self._fall_back(reason, inputs)
        size = self._size_of(inputs)
        slot = self._slots.get(size)
        if slot is None or (replay := slot.replay) is None:
            return self._without_replay(size, inputs)
        if self._checks_capture and self._recorder.in_capture():
            return self._fall_back(IN_A_CAPTURE, inputs)
        if torch_private.is_profiled() and not replay.can_launch_profiled:
            return self._fall_back(PROFILED, inputs)
        if slot.waits_for_memory():
            return self._fall_back(NO_MEMORY, inputs)
        if slot.is_new:
            self._begin_replays(slot, replay)
        if replay.layout.saves_together and torch_private.saves_by_hooks():
            # A mismatch and no refusal: if it recurs, the size is recorded for calls with and without hooks.
            return self._replay(slot, _seen_by_hooks, inputs)
        if replay.counts.replays >= replay.counts.next_check:
            return self._checked(slot, replay, inputs)
        return self._replay(slot, replay.serve, inputs)

    def why_not(self, inputs: Sequence[Any]) -> str | None:
        """Return why a call on these inputs can neither be replayed nor recorded for now; None if it can."""
        return self._conditions.why_not(inputs)

    def _begin_replays(self, slot: SizeSlot, replay: Replay) -> None:
        """Give back memory before the first replay, and have the compiled helper serve the calls after it."""
        # The call that recorded had gradients and verification's copies in the same segments of PyTorch's allocator: it could not give them back.
        self.empty_cache(workspaces=self._scratch.is_large)
        with self._changing:
            if slot.replay is replay:  # no other thread has recorded it again
                slot.is_new = False
                if replay.fused is not None:
                    self._fused[slot.size] = replay.fused

    def run_in_python(self, inputs: list[Any]) -> Any:
        """Run a call that the compiled helper could not serve by its recording."""
        slot = self._slots.get(self._size_of(inputs))
        if slot is None or (replay := slot.replay) is None:
            return self(inputs)
        return self._replay(slot, replay.serve_in_python, inputs)

    def replay_failed(self, inputs: list[Any], error: BaseException) -> Any:
        """Run a call whose replay raised `error` before its launch, as KERNELS. Raises an `error` that is no `Exception`, as an interrupt."""
        raised = [error]
        del error  # or its traceback, which holds this frame, would be garbage that only a collection frees

        def fail(_: list[Any]) -> Any:
            with kernels_on_error:
                raise raised.pop()

        size = self._size_of(inputs)  # another thread may have dropped the recording and forgotten the size
        return self._replay(self._slots.get(size) or SizeSlot(size), fail, inputs)

    def _checked(self, slot: SizeSlot, replay: Replay, inputs: list[Any]) -> Any:
        """Run a call at which results may have to be checked, and the scratch is what recordings that are gone have left."""
        self._scratch.settle()
        if reason := self._check.verdict(replay):
            self._drop(slot)
            slot.refusal = refusal = Refusal(reason, Persistence.PROCESS, ReasonCode.RESULTS_DIFFER)
            with guarded(self._report, "marking an entry"):
                self._note_failed_check(slot.size, refusal.why)
            return self._fall_back(reason, inputs)
        given = self._check.begin(replay, inputs)
        outputs = self._replay(slot, replay.serve, inputs)
        if given is not None:
            self._check.end(replay, given, outputs)
        return outputs

    def _replay(self, slot: SizeSlot, replay: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        if torch_private.is_profiled():
            replay = torch_private.named(replay, f"pygraph: {self._name(slot)}")
        reason = mismatch = None
        try:
            outputs, drawn = replay(inputs)
        except FallbackError as error:
            reason, mismatch = str(error), error.mismatch
        except torch.OutOfMemoryError:
            reason = NO_MEMORY
            slot.note_shortage()
            self._fused.pop(slot.size, None)
        except DriverError as error:
            reason = str(error)
            self._drop(slot)  # after an error of the driver, it serves no further call
            slot.refusal = Refusal(reason, Persistence.PROCESS)
        if reason is not None:
            # Outside of `except`: the error's traceback keeps the memory of the replay.
            if mismatch is None or torch_private.is_profiled():
                return self._fall_back(reason, inputs)
            if not slot.mismatches.add(inputs, mismatch) or self._why_no_more():
                return self._fall_back(reason, inputs)
            return self._record_or_fall_back(slot, inputs, reason)
        slot.shortage = None
        if self._needs_draws and slot.replay is not None:
            self._note_draw(slot.replay, outputs, drawn)
        return outputs

    def _size_of(self, inputs: list[Any]) -> Size:
        if not self._is_called:
            self._integers[:] = [index for index, value in enumerate(inputs) if type(value) is int]
            self._is_called = True
        return tuple(map(inputs.__getitem__, self._integers))

    def _note_draw(self, replay: Replay, outputs: Any, drawn: PhiloxRange | None) -> None:
        """Note the range of random numbers that a replay has drawn."""

    def _fall_back(self, reason: str, inputs: list[Any]) -> Any:
        self._report.count_fallback(reason)
        self._pipeline.note_kernels_ran()
        return self._run_kernels(inputs)

    def _without_replay(self, size: Size, inputs: list[Any]) -> Any:
        with self._changing:
            slot = self._slots.called(size)
        if slot is None:
            return self._fall_back(self._add_slot(size) or NOT_YET, inputs)
        if reason := self._why_not_record(slot):
            return self._fall_back(reason, inputs)
        return self._record_or_fall_back(slot, inputs, BEING_RECORDED)

    def _why_not_record(self, slot: SizeSlot) -> str | None:
        if slot.refusal is not None:
            if not self._may_be_over(slot, slot.refusal):
                return slot.refusal.reason
            slot.refusal = None
        if reason := RECORDING_CLOSED if self._is_closed else self._why_no_more():
            return reason
        if self._recorder.in_capture():
            return IN_A_CAPTURE
        return PROFILED if torch_private.is_profiled() else None

    def _may_be_over(self, slot: SizeSlot, refusal: Refusal) -> bool:
        if refusal.persistence is not Persistence.TRANSIENT or self._recorder.in_capture():
            return False
        cannot_capture = refusal.code is ReasonCode.CANNOT_CAPTURE_NOW
        return self._recorder.why_not() is None if cannot_capture else slot.retries.count()

    # --- recording ---

    def _record_or_fall_back(self, slot: SizeSlot, inputs: list[Any], reason: str) -> Any:
        """Record a call; while another thread is recording, run it as KERNELS for `reason`."""
        if not self._recording.acquire(blocking=False):
            return self._fall_back(reason, inputs)
        try:
            return self._record(slot, inputs)
        finally:
            self._recording.release()

    def _record(self, slot: SizeSlot, inputs: list[Any]) -> Any:
        """Run a call as KERNELS, and keep a recording of it if verification passes."""
        self._log(slot, "recording")
        before, constraints = slot.disagreements, slot.mismatches.constraints
        in_full = None if before.in_full is None else before.in_full | self.facts.nondeterministic
        attempt = self._pipeline.record(inputs, constraints, differed=before.in_values, in_full=in_full)
        if isinstance(attempt, Refusal):
            self._refuse(slot, attempt)
            self._pipeline.note_kernels_ran()
            return self._run_kernels(inputs)
        # The kernels are to use the memory that recording has used, and no more of the device beside it.
        self._trim()
        try:
            outputs = self._run_kernels(inputs)
            found = self._pipeline.compare(attempt, outputs)
        except BaseException:
            attempt.close()
            raise  # the user's own, as without us
        if found is None:
            self._keep(slot, attempt)
            return outputs
        attempt.close()
        self._trim()
        if not isinstance(found, Refusal):
            found = Refusal(str(found), slot.disagreements.add(found), ReasonCode.RESULTS_DIFFER)
        self._refuse(slot, found)
        return outputs

    def _keep(self, slot: SizeSlot, attempt: Attempt) -> None:
        slot.disagreements.latest = None
        replay = attempt.keep()
        self._scratch.add(replay)
        replay.counts.next_check = self._check.first_poll(replay)
        with self._changing:
            is_closed, before, more = self._is_closed, slot.replay, attempt.nodes - slot.nodes
            if not is_closed:
                self._slots[slot.size] = slot  # another thread may have forgotten it meanwhile
                slot.replay = replay
                slot.nodes = attempt.nodes
                slot.is_new = True
                self._fused.pop(slot.size, None)
        if is_closed:  # by another thread, which has dropped what there was: nobody would drop this one
            self._destroy(replay)
            self._refuse(slot, Refusal(RECORDING_CLOSED, Persistence.ONE_CALL))
            return
        self._log(slot, f"recorded and verified: {attempt.nodes} nodes")
        self._report.note_nodes(more)
        memory = sum(each.bytes for each in replay.layout.memories)
        self._report.note_graph(self.facts.digest, slot.size, nodes=attempt.nodes, memory_bytes=memory)
        self.trim()
        self._report.count(captured=1)
        self._destroy(before)
        for oldest in self._recorded()[: -self._max_recordings]:
            self._drop(oldest)
