"""Keeps launches that read memory at a fixed address on one stream at a time.

This memory is written before each launch, and a write must not overtake a launch that still reads. On one stream it cannot; between
streams there is no order.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from pygraphd.client.backend.errors import REENTERED, DisturbedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.backend.driver import Driver

OTHER_STREAM = "draws random numbers, and is on another stream than what has done so before"


class StreamAffinity:
    """The stream that uses memory at a fixed address. Another stream may use it once this one is idle.

    `lock` is to be held from `enter` until the launch, as other threads may write on this stream, too: by `held`, or as that does.
    """

    def __init__(self, driver: Driver, watch: Callable[[], Callable[[], bool]]) -> None:
        """Begin on no stream; `watch()` returns a function that tells whether the stream current now has nothing left to do."""
        self.lock = threading.RLock()  # a signal handler may come between taking it and noting the holder
        self.holder = 0
        """The thread that holds the lock, for its own calls alone: a signal handler may call a graph within a launch. 0: none."""
        self._driver = driver
        self._watch = watch
        self._stream: int | None = None
        self._has_ended: Callable[[], bool] = bool

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for other threads; raises `FallbackError` in a thread that holds it already, which would wait for itself."""
        if self.holder == threading.get_ident():
            raise DisturbedError(REENTERED)
        with self.lock:
            self.holder = threading.get_ident()
            try:
                yield
            finally:
                self.holder = 0

    def enter(self, stream: int) -> bool:
        """Move to the stream with this handle; return whether it was another one before. Raises `FallbackError`, with nothing changed."""
        if stream == self._stream:
            return False
        self.expect(stream)
        self.move(stream)
        return True

    def expect(self, stream: int) -> None:
        """Raise `FallbackError` if `enter` would, so that nothing is prepared in vain. Takes no lock, so `enter` may still raise later."""
        if self._stream not in (None, stream) and not self._may_leave():
            raise DisturbedError(OTHER_STREAM)

    def move(self, stream: int) -> None:
        """Go on on the current stream, now that nothing is left to do on another one; raises nothing."""
        self._has_ended = bool  # never, if it cannot be watched
        with contextlib.suppress(Exception):
            self._has_ended = self._watch()
        self._stream = stream

    def leave(self) -> None:
        """Allow any stream next, as nothing was done since `enter`."""
        self._stream = None

    def _may_leave(self) -> bool:
        # A CUDA error of the user's work must surface in the user's own call.
        with contextlib.suppress(Exception), self._driver.relaxed():
            return self._has_ended()
        return False
