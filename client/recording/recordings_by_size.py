"""Keeps the recordings of one callable by size, within bounds, with the refusals of sizes, and answers what trials ask about them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pygraphd.client.common import log
from pygraphd.client.common.guard import guarded
from pygraphd.client.recording.size_slot import Persistence, Refusal, Size, SizeSlot, SizeSlots
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.capture import CudaRecorder
    from pygraphd.client.recording.pipeline import Pipeline
    from pygraphd.client.replay.native.ffi import Fused
    from pygraphd.client.replay.replay import Replay
    from pygraphd.client.replay.scratch import SharedScratch

CAPTURES_OF_EACH = 4
"""Captures of one callable at most, as a multiple of its recordings: sizes that alternate are not recorded for ever."""
MAX_SIZE_SLOTS = 64
"""Sizes of one callable that are remembered at least: four times the bound on recordings if that is more, which makes 256 by default."""

TOO_MANY_SIZES = "more sizes than are remembered"
TOO_MANY_CAPTURES = "captured as often as is allowed"


class RecordingsBySize:
    """The recordings of one callable, and the refusals of its sizes. `Recordings` makes them, and runs calls by them."""

    def __init__(
        self,
        pipeline: Pipeline,
        recorder: CudaRecorder,
        report: Report,
        facts: GraphFacts,
        max_recordings: int,
        scratch: SharedScratch,
    ) -> None:
        self.facts = facts
        """The facts that the analysis of the graph found."""
        self._pipeline = pipeline
        self._recorder = recorder
        self._report = report
        self._max_recordings = max_recordings
        self._scratch = scratch
        self._slots = SizeSlots()
        self._fused: dict[Size, Fused] = {}
        """The recordings that the compiled helper serves, by size."""
        self._is_closed = False
        self._replays_gone = 0
        """Calls that recordings have served which are gone."""
        self._changing = threading.RLock()
        """Guards `_slots` and their recordings; held only while they change. A signal handler may call a graph meanwhile."""

    # --- slots ---

    def _add_slot(self, size: Size) -> str | None:
        """Remember a size at its first call, in place of another one if need be; return why it cannot be, None if it is."""
        if reason := self._why_no_more():
            return reason
        with self._changing:
            most = max(MAX_SIZE_SLOTS, CAPTURES_OF_EACH * self._max_recordings)
            is_full = size not in self._slots and len(self._slots) >= most
            # With collectives none is forgotten: ranks count the calls of each size alike, and would not forget the same ones.
            if is_full and (any(self.facts.collectives) or not self._slots.forget_one()):
                return TOO_MANY_SIZES
            self._slots.remember(size)
        return None

    def _why_no_more(self) -> str | None:
        most = CAPTURES_OF_EACH * self._max_recordings
        return TOO_MANY_CAPTURES if self._pipeline.captures >= most else None

    def _recorded(self) -> list[SizeSlot]:
        """Return the slots that have a recording, the least recently used one first."""
        slots = list(self._slots.values())
        used = {slot: replay.counts.used for slot in slots if (replay := slot.replay) is not None}
        return sorted(used, key=used.__getitem__)

    def _refuse(self, slot: SizeSlot, refusal: Refusal) -> None:
        self._report.count_fallback(refusal.reason)
        self._log(slot, f"not recorded: {refusal.reason} ({refusal.code.value}, {refusal.persistence.name})")
        if refusal.persistence is not Persistence.ONE_CALL:
            slot.refusal = refusal

    def _drop(self, slot: SizeSlot) -> None:
        """Destroy the recording of a size, if there is one."""
        with self._changing:
            replay, slot.replay = slot.replay, None
            self._fused.pop(slot.size, None)
            nodes, slot.nodes = slot.nodes, 0
        self._destroy(replay)
        self._report.note_nodes(-nodes)

    def _destroy(self, replay: Replay | None) -> None:
        if replay is not None:
            replay.close()
            self._replays_gone += replay.counts.replays
            self._scratch.remove(replay)

    def close(self) -> None:
        """Destroy all recordings, and make no more."""
        with self._changing:
            self._is_closed = True
        for slot in self._recorded():
            self._drop(slot)

    def _name(self, slot: SizeSlot) -> str:
        return f"{self.facts.name} at {','.join(map(str, slot.size))}" if slot.size else self.facts.name

    def _log(self, slot: SizeSlot, text: str) -> None:
        log.info("%s: %s", self._name(slot), text)

    # --- memory ---

    def trim(self) -> None:
        """Give back free memory and the workspaces of BLAS libraries, once there is a recording. Raises nothing."""
        if self._recorded():
            self._trim()
            self._reserve()

    def empty_cache(self, *, workspaces: bool = False) -> None:
        """Give free memory back if there is much of it, with the workspaces of BLAS libraries. Raises nothing."""
        with guarded(self._report, "giving memory back"):
            self._recorder.empty_cache(with_workspaces=workspaces)
        self._reserve()

    def _trim(self) -> None:
        # A CUDA error of the user's work must surface in the user's own call.
        with guarded(self._report, "giving memory back"), self._report.recording():
            self._recorder.trim()

    def _reserve(self) -> None:
        with guarded(self._report, "reserving scratch"):
            self._scratch.reserve(self._recorder.free_bytes, self._recorder.allocate_workspace)

    # --- state ---

    @property
    def why_refused(self) -> Reason | None:
        """Why the callable could not or will not be recorded; None if there is a recording, or none was tried."""
        return None if (refusal := self._refusal()) is None else refusal.why

    @property
    def refused_for_good(self) -> bool:
        """Whether the reason holds in the next process too."""
        return (refusal := self._refusal()) is not None and refusal.persistence is Persistence.PERMANENT

    def _refusal(self) -> Refusal | None:
        slots = list(self._slots.values())
        if any(slot.replay is not None for slot in slots):
            return None
        reason = self._why_no_more()
        bound = Refusal(reason, Persistence.PROCESS, ReasonCode.BOUND_REACHED) if reason else None
        return next((slot.refusal for slot in slots if slot.refusal is not None), bound)

    @property
    def recording_us(self) -> float:
        """Host time of recording and verifying all sizes so far, in microseconds, whether or not that succeeded."""
        return self._pipeline.host_us

    @property
    def one_time_work(self) -> int:
        """A number that changes when a call makes a recording or an executable, and so is no steady-state call."""
        return self._pipeline.captures + sum(each.executables for each in self.replays)

    @property
    def replayed(self) -> int:
        """The number of calls that recordings have served."""
        return self._replays_gone + sum(each.counts.replays for each in self.replays)

    @property
    def replays(self) -> tuple[Replay, ...]:
        """The recordings, the most recently used one last."""
        return tuple(slot.replay for slot in self._recorded() if slot.replay is not None)
