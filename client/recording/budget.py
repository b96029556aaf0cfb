"""Holds the GPU memory of a recording against what is free and against `PYGRAPH_MEMORY`, before it is allocated."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pygraphd.client.backend.errors import NoMemoryError
from pygraphd.client.common.guard import guarded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.capture import CudaRecorder

NO_MEMORY_TO_VERIFY = "not enough free memory to verify a recording"
OVER_LIMIT = "recording it takes more GPU memory than PYGRAPH_MEMORY allows"
WORKSPACE_BYTES = 32 << 20
"""Bytes of a BLAS library's workspace, which a capture allocates anew, and a call as KERNELS only once in a process."""


class Budget:
    """The memory that a recording may take at a time. It counts the bytes of tensors: PyTorch reserves whole segments for them."""

    def __init__(self, recorder: CudaRecorder, report: Report) -> None:
        """Ask `recorder` for the memory of its device, and note in `report` how much is asked for."""
        self._recorder, self._report = recorder, report
        self._kernels_bytes: int | None = None
        """The most bytes that a call as KERNELS has allocated one after the other; None: that was not measured."""

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
        self.note(held + size)
        if reason := self.why_unavailable(size, held):
            raise NoMemoryError(reason)

    def note(self, size: int) -> None:
        """Note that a recording has `size` bytes at a time."""
        self._report.note_memory(size)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a call as KERNELS if there is a limit: only then does the first capture of its size need an estimate."""
        if not self._recorder.memory_bytes:
            yield
            return
        before: int | None = None
        with guarded(self._report, "measuring memory"):
            before = self._recorder.allocated_so_far()
        # Not guarded: an error of this call is the program's own.
        yield
        if before is not None:
            with guarded(self._report, "measuring memory"):
                allocated = self._recorder.allocated_so_far() - before
                if allocated > 0:  # the program may set PyTorch's counts back
                    self._kernels_bytes = max(allocated, self._kernels_bytes or 0)

    def of_first_capture(self) -> int:
        """Return how many bytes the first capture of a call takes at most in memory of its own, as far as calls as KERNELS show that.

        It is only asked for to keep the limit: 0 where there is none.
        """
        if not self._recorder.memory_bytes:
            return 0
        at_a_time = self._recorder.bytes_of_a_call()
        if self._kernels_bytes is None:
            return at_a_time
        # Both may be too high. The peak may be that of another part of the program, and the sum counts reused memory each time.
        return min(at_a_time, self._kernels_bytes + WORKSPACE_BYTES)
