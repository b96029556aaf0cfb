"""Looking at many tensors in one call, by the compiled helper where it is there, and by Python where it is not.

A replay compares the addresses of hundreds of inputs, and the references to as many saved tensors: in Python that is a tenth of a
microsecond for each, at every call.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.client import _torch, native

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Looks(Protocol):
    """What is asked about many tensors at once."""

    def unchanged(self, tensors: list[Any], pointers: list[int | None], indices: list[int], /) -> bool:
        """Whether the tensors of a list lie where a second list says, at the indices of a third."""

    def references(self, objects: list[Any], /) -> list[int]:
        """Return how many references there are to each."""

    def same_references(self, objects: list[Any], counts: list[int], /) -> bool:
        """Whether there still are as many as `references` has said."""


class InPython:
    """The same without a helper."""

    def __init__(self) -> None:
        self.unchanged = _torch.pointers_unchanged()

    def references(self, objects: list[Any], /) -> list[int]:
        """See `Looks`."""
        return list(map(sys.getrefcount, objects))

    def same_references(self, objects: list[Any], counts: list[int], /) -> bool:
        """See `Looks`."""
        return list(map(sys.getrefcount, objects)) == counts


class Helper:
    """The compiled helper of a process."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._looks: Looks | None = None

    def prepare(self, cache: Path) -> str | None:
        """Have it compiled if it never was; return why it will not be there, or None."""
        if self._path is not None or self._looks is not None:
            return None
        if reason := _torch.missing_for_looks():
            return reason
        try:
            path = native.place(cache)
            reason = native.compile_once(path)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"it cannot be compiled: {error}"
        if reason is None:
            self._path = path
        return reason

    def looks(self, note: Callable[[str], None]) -> Looks:
        """Return the helper if it is there by now, and what does the same in Python if not; `note` is told why it is of no use."""
        if self._looks is None and self._path is not None:
            self._load(self._path, note)
        return self._looks or InPython()

    def _load(self, path: Path, note: Callable[[str], None]) -> None:
        module: Any = native.load(path)
        if module is None:
            return  # it is being compiled
        self._path = None
        reason = module if isinstance(module, str) else _torch.configure_looks(module)
        if reason is None:
            self._looks = module
        else:
            note(f"compiled helper: {reason}")

    def wait(self, timeout_s: float) -> bool:
        """Wait until what was prepared is compiled, for a benchmark or a test; return whether it is."""
        end = time.monotonic() + timeout_s
        while self._path is not None and not self._path.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return self._looks is not None or (self._path is not None and self._path.exists())

    def forget(self) -> None:
        """Be as at the beginning of a process."""
        self._path = self._looks = None


helper = Helper()
