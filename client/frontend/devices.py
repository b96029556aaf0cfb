"""Owns the recorder of each GPU and the compiled helper. Imports both only when a graph is recorded."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pygraphd.client.backend import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.decisions.ranks.process_group import Groups
    from pygraphd.client.frontend.settings import Options
    from pygraphd.client.recording.capture import CudaRecorder
    from pygraphd.client.recording.recordings import Recordings
    from pygraphd.client.replay.scratch import SharedScratch
    from pygraphd.schema.reasons import Reason


class Devices:
    """Makes the recordings of callables, with one recorder for each GPU."""

    def __init__(self, options: Options, cache_folder: Path, report: Report, groups: Groups) -> None:
        """Make recordings as the options say, with the helper that is compiled into `cache_folder`, and those of collectives with `groups`."""
        self._options = options
        self._folder = cache_folder
        self._report = report
        self._groups = groups
        self._collective: weakref.WeakSet[Recordings] = weakref.WeakSet()
        """The recordings that may hold collectives."""
        self._recorders: dict[int, CudaRecorder | None] = {}
        self._scratch: weakref.WeakValueDictionary[tuple[str, int], SharedScratch] = (
            weakref.WeakValueDictionary()
        )
        """By the hash of a graph and its device, as long as there are recordings of it: each size has recordings of its own."""

    def recordings(
        self,
        run_kernels: Runnable,
        device_index: int,
        facts: GraphFacts,
        note_failed_check: Callable[[tuple[int, ...], Reason], None],
    ) -> Recordings | None:
        """Return a callable as relocatable graphs, if these can be recorded here; for `note_failed_check` see `Recordings`."""
        recorder = self.recorder(device_index)
        if recorder is None:
            return None
        from pygraphd.client.recording.attention_host import make_recordings
        from pygraphd.client.recording.recordings import MAX_RECORDINGS
        from pygraphd.client.replay.scratch import SharedScratch

        # Some at least, whatever PYGRAPH_SIZES says: under a process group one decision holds for all sizes.
        most = max(self._options.sizes.sizes, MAX_RECORDINGS)
        recheck_s = self._options.recheck_s
        scratch = self._scratch.setdefault((facts.digest, device_index), SharedScratch())
        made = make_recordings(
            run_kernels,
            recorder,
            self._report,
            facts,
            most,
            recheck_s,
            note_failed_check,
            scratch,
            groups=self._groups,
        )
        if any(facts.collectives):
            self._collective.add(made)
        return made

    def end_collectives(self, group: str | None = None) -> None:
        """Destroy the recordings of collectives of the group with this name, before it ends, which would wait for them. None: of all groups."""
        for each in list(self._collective):
            groups = {name for collectives in each.facts.collectives for _, name in collectives}
            if group is None or group in groups:
                each.close()

    def recorder(self, device_index: int) -> CudaRecorder | None:
        """Return the recorder of a GPU; None, and a failure in the report, where nothing can be recorded."""
        # None is remembered as well, so that a failure is counted once.
        if device_index not in self._recorders:
            made = self._recorder(device_index)
            self._recorders.setdefault(device_index, made)  # another thread may have made one meanwhile
        return self._recorders[device_index]

    def _recorder(self, device_index: int) -> CudaRecorder | None:
        from pygraphd.client.backend import driver
        from pygraphd.client.recording.capture import CudaRecorder
        from pygraphd.client.replay.native.ffi import helper

        try:
            if reason := torch_private.missing_for("relocation"):
                raise driver.DriverError(reason, 0)
            loaded = driver.load()
            # The helper is compiled into the cache's folder, to which a read-only process adds nothing.
            if reason := helper.prepare(self._folder, may_compile=not self._options.readonly):
                raise driver.DriverError(f"compiled helper: {reason}", 0)
            return CudaRecorder(loaded, device_index, self._options.memory_bytes)
        except driver.DriverError as error:
            self._report.count_failure(f"relocatable graphs: {error}")
            return None
