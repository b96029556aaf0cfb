"""Who sees to it that a compiled graph's inputs are aligned, as its kernels take for granted: PyTorch's trees, or what copies them.

Inductor leaves it to the captured graph where it believes that there is one. Where any part is launched, if only now and then,
inputs are copied as where nothing is captured; what is not needed any more must not stay in the way.
"""

from __future__ import annotations

import threading
from typing import Any

from pygraphd.client import _torch


class Alignment:
    """That of one compiled graph, which is handed in; None as long as it is not complete, or if it is gone."""

    def __init__(self) -> None:
        self.undecided = 0
        """Parts of which it is not decided how they run."""
        self.launches = False
        """Whether any part is launched for good, or copies no inputs itself."""
        self._looked_at = 0
        self._without: tuple[Any, Any] | None = None
        """What copies inputs, and what ran before."""
        self._changing = threading.Lock()  # looks begin in a thread of their own

    def begin(self) -> None:
        """Note one more part that is undecided."""
        with self._changing:
            self.undecided += 1

    def end(self, compiled: Any) -> None:
        """Note that it is decided of one part."""
        with self._changing:
            self.undecided -= 1
            self._copy_no_more(compiled)

    def begin_look(self, compiled: Any) -> None:
        """Have inputs be copied, if they are not, as one part that is captured will be launched now and then."""
        with self._changing:
            if compiled is not None and not self.launches and self._without is None:
                self._copy_inputs(compiled)
            self._looked_at += 1

    def end_look(self, compiled: Any) -> None:
        """Note that one of these is launched no more."""
        with self._changing:
            self._looked_at -= 1
            self._copy_no_more(compiled)

    def complete(self, compiled: Any) -> None:
        """Have inputs be copied if need be, now that Inductor has put in place what it wants."""
        with self._changing:
            if self.undecided or self.launches:
                self._copy_inputs(compiled)

    def replaced(self, compiled: Any, one: object, other: Any) -> bool:
        """Put one callable in the place of another if inputs are copied for just that; return whether it was so."""
        with self._changing:
            if self._without is None or self._without[1] is not one or compiled is None:
                return False
            copying = _torch.aligned(compiled, other)
            found = _torch.replace_callable(compiled, self._without[0], copying)
            self._without = (copying, other)
            return found

    def _copy_inputs(self, compiled: Any) -> None:
        before = compiled.current_callable
        copying = _torch.aligned(compiled, before)
        _torch.replace_callable(compiled, before, copying)
        # Where something stays launched so does this; and what is not needed any more must not keep the graph alive.
        self._without = None if self.launches else (copying, before)

    def _copy_no_more(self, compiled: Any) -> None:
        if self._without is None or ((self.undecided or self._looked_at) and not self.launches):
            return
        if not self.launches and compiled is not None:
            _torch.replace_callable(compiled, *self._without)
        self._without = None
