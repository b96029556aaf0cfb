"""Holds the GPU memory of a recording against what is free and against `PYGRAPH_MEMORY`, before it is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.backend.errors import NoMemoryError

if TYPE_CHECKING:
    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.capture import CudaRecorder

NO_MEMORY_TO_VERIFY = "not enough free memory to verify a recording"
OVER_LIMIT = "recording it takes more GPU memory than PYGRAPH_MEMORY allows"


class Budget:
    """The memory that a recording may take at a time. It counts the bytes of tensors: PyTorch reserves whole segments for them."""

    def __init__(self, recorder: CudaRecorder, report: Report) -> None:
        self._recorder, self._report = recorder, report

    def why_unavailable(self, size: int, held: int = 0) -> str | None:
        """Return why `size` more bytes cannot be had; None if they can.

        `held` bytes count against the limit alone: the recording has them already, or whoever allocates them finds out if they are free.
        """
        limit = self._recorder.memory_bytes
        if limit and held + size > limit:
            return OVER_LIMIT
        return NO_MEMORY_TO_VERIFY if size and size > self._recorder.free_bytes() else None

    def require(self, size: int, held: int = 0) -> None:
        """Raise `NoMemoryError` if `size` more bytes cannot be had beside `held` ones; see `why_unavailable`."""
        # Also if it cannot be had: the summary then shows how large `PYGRAPH_MEMORY` would have to be.
        self._report.note_memory(held + size)
        if reason := self.why_unavailable(size, held):
            raise NoMemoryError(reason)
