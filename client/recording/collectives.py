"""Records graphs with collectives, in lockstep with the other ranks of their process group.

Every rank has to run the collectives of a call equally often. An ordinary call runs them once on each rank, by a replay on one and as
KERNELS on another if need be. The call that is recorded runs them twice on all ranks: once on copies of its inputs, and once as KERNELS.
Nothing else runs them: no rank records alone, a recording that differs is not repeated, no result is checked later, and a trial runs each
call in one deployment.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend.errors import NotRelocatableError, RanksError
from pygraphd.client.common.guard import guarded
from pygraphd.client.recording.pipeline import STUCK
from pygraphd.client.recording.recordings import BEING_RECORDED, MAX_RECORDINGS, NOT_YET, Recordings
from pygraphd.client.recording.size_slot import Persistence, Refusal, Size, SizeSlot
from pygraphd.schema.reasons import ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.decisions.ranks.lockstep import Lockstep
    from pygraphd.client.decisions.ranks.process_group import Groups
    from pygraphd.client.recording.capture import CudaRecorder

ATTEMPT_CALLS = (3, 16, 64, 256)
"""The calls of a size at which all ranks attempt to record it, until an attempt succeeds: a rank that was late may be in time later."""
IDLE_S = 5.0
"""Seconds that a rank waits for its GPU to be idle before it votes against the attempt. If all GPUs are idle, no rank is behind."""
NOT_IDLE = f"the GPU of a rank was not idle within {IDLE_S:g} s"
A_RANK_RUNS_KERNELS = "a rank runs KERNELS"


class CollectiveRecordings(Recordings):
    """Recordings of a callable that runs collectives. All calls that do not run as GRAPH have to go through `run_kernels_or_record`."""

    def __init__(
        self,
        run_kernels: Runnable,
        recorder: CudaRecorder,
        report: Report,
        facts: GraphFacts,
        groups: Groups,
        max_recordings: int = MAX_RECORDINGS,
    ) -> None:
        super().__init__(run_kernels, recorder, report, facts, max_recordings)
        self._groups = groups
        self._timeout_s: Callable[[], float] | None = None
        """Returns the present time-out of the process group, once there is a recording."""

    @property
    def is_awaited(self) -> bool:
        """Whether there is no recording yet, and the ranks may still make one."""
        return not self._recorded() and self._refusal() is None

    @property
    def run(self) -> Runnable:
        """See `Recordings.run`; each replay is watched."""
        run, note = super().run, self._recorder.watch.note

        def watched(inputs: list[Any]) -> Any:
            outputs = run(inputs)
            note(self._timeout_s)
            return outputs

        return watched

    def run_kernels_or_record(self, inputs: list[Any]) -> Any:
        """Run a call as KERNELS, and record it if it is an attempt in which all ranks take part."""
        size = self._size_of(inputs)
        if size not in self._slots:
            self._add_slot(size)
        slot = self._slots.get(size)
        if slot is not None and slot.replay is None:
            # Ranks need no message to attempt at the same call: all make the same calls of a graph with collectives.
            slot.calls += 1
            if slot.calls in ATTEMPT_CALLS:
                with self._recorder.on_device() or contextlib.nullcontext():
                    return self._attempt(slot, inputs)
        return self._run_kernels(inputs)

    def _without_replay(self, size: Size, inputs: list[Any]) -> Any:
        slot = self._slots.get(size)
        refusal = slot.refusal if slot is not None else None
        self._report.count_fallback(NOT_YET if refusal is None else refusal.reason)
        return self.run_kernels_or_record(inputs)

    def _record_or_fall_back(self, slot: SizeSlot, inputs: list[Any], reason: str) -> Any:
        return self._fall_back(reason, inputs)  # the layout does not fit on this rank: it would record alone

    # --- an attempt ---

    def _attempt(self, slot: SizeSlot, inputs: list[Any]) -> Any:
        in_guard = guarded(self._report, "recording by all ranks", in_full=True)
        lockstep = in_guard(lambda: self._begin(slot, inputs))
        if lockstep is None:
            return self._run_kernels(inputs)
        if not self._recording.acquire(blocking=False):
            # Without this vote the others would wait for this rank until the limit.
            lockstep.refuse(BEING_RECORDED)
            return self._run_kernels(inputs)
        try:
            return self._record_together(slot, inputs, lockstep)
        finally:
            self._recording.release()

    def _begin(self, slot: SizeSlot, inputs: Sequence[Any]) -> Lockstep | None:
        """Begin an attempt; return None if this rank has not voted for it, so that all ranks run KERNELS."""
        name = f"{self.facts.digest}/{','.join(map(str, slot.size))}"
        try:
            lockstep = self._groups.lockstep(frozenset().union(*self.facts.collectives), name)
        except NotRelocatableError as error:
            self._refuse(slot, Refusal(str(error), Persistence.PROCESS, ReasonCode.COLLECTIVES))
            return None
        except RanksError as error:
            # Not voted, since that takes the store. Without this rank's vote no rank records.
            if slot.refusal is None:
                persistence = Persistence.PROCESS if _is_last(slot) else Persistence.ONE_CALL
                self._refuse(slot, Refusal(str(error), persistence, ReasonCode.RANKS_NOT_RECORDED))
            return None
        reason = A_RANK_RUNS_KERNELS if self._is_closed else self._why_not_record(slot)
        reason = reason or self._conditions.why_not(inputs)
        # Asked last, since it may take seconds.
        if reason is None and not self._recorder.is_idle_within(IDLE_S):
            reason = NOT_IDLE
            lockstep.is_late = True
        if reason is None:
            return lockstep
        is_new = slot.refusal is None
        lockstep.refuse(reason, for_good=not is_new or self._is_closed)
        if is_new:
            self._abort(slot, Refusal(reason, Persistence.ONE_CALL, ReasonCode.RANKS_NOT_RECORDED), lockstep)
        return None

    def _record_together(self, slot: SizeSlot, inputs: list[Any], lockstep: Lockstep) -> Any:
        """Run a call as KERNELS, and keep a recording of it if those of all ranks are verified."""
        self._log(slot, "recording with all ranks")
        pipeline = self._pipeline
        try:
            attempt = pipeline.record(inputs, slot.mismatches.constraints, lockstep=lockstep)
        except BaseException:
            # The others must not wait for a rank that has left the call.
            lockstep.refuse("a call raised")
            raise
        if isinstance(attempt, Refusal):
            # Before KERNELS: their collectives wait for the other ranks, and these still wait for this vote.
            self._abort(slot, attempt, lockstep)
            pipeline.note_kernels_ran()
            return self._run_kernels(inputs)
        self._trim()
        try:
            outputs = self._run_kernels(inputs)
            difference = pipeline.compare(attempt, outputs)
        except BaseException:
            lockstep.refuse("a call raised")
            if not pipeline.stuck:
                attempt.close()
            raise  # as without PyGraph
        if difference is None:
            self._keep(slot, attempt)
            self._timeout_s = lockstep.present_timeout_s
            self._recorder.watch.begin(lockstep.timeout_s)
            return outputs
        if not isinstance(difference, Refusal):
            difference = Refusal(str(difference), Persistence.PROCESS, ReasonCode.RESULTS_DIFFER)
        # Else the memory stays: releasing what a stuck GPU works on would wait for it, without a limit.
        if not pipeline.stuck:
            attempt.close()
        self._abort(slot, difference, lockstep)
        return outputs

    def _abort(self, slot: SizeSlot, refusal: Refusal, lockstep: Lockstep) -> None:
        """Abort the attempt on all ranks, and refuse the size if no further attempt will be made."""
        # Attempts end once the ranks have replayed: a recording that differs is not repeated.
        if refusal.persistence in {Persistence.ONE_CALL, Persistence.TRANSIENT}:
            is_over = _is_last(slot) or lockstep.steps > 0
            persistence = Persistence.PROCESS if is_over else Persistence.ONE_CALL
            refusal = dataclasses.replace(refusal, persistence=persistence)
        lockstep.refuse(refusal.reason, for_good=refusal.persistence is not Persistence.ONE_CALL)
        self._refuse(slot, refusal)
        if lockstep.is_late or refusal.reason == STUCK:
            self._groups.note_late(lockstep)


def _is_last(slot: SizeSlot) -> bool:
    return slot.calls == ATTEMPT_CALLS[-1]
