"""Memory at a fixed address that is written before launches which read it: all of that happens on one stream at a time.

What is written next must not overtake a launch that still reads. On one stream it cannot; of several, the driver knows no order.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from pygraphd.client.backend.errors import FallbackError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.backend.driver import Driver

OTHER_STREAM = "draws random numbers or copies inputs, and is on another stream than what has done so before"


class OneStream:
    """The stream that such memory is in use on; another one may follow when that has nothing left to do."""

    def __init__(self, driver: Driver, watch: Callable[[], Callable[[], bool]]) -> None:
        """`watch` returns what says of the stream that is current now whether it has nothing left to do."""
        self.lock = threading.Lock()
        """To be held from `enter` until the launch, as other threads may write on this stream, too."""
        self._driver = driver
        self._watch = watch
        self._stream: int | None = None
        self._has_ended: Callable[[], bool] = bool

    def enter(self, stream: int) -> bool:
        """Go on, on the current stream, of which this is the handle, and return whether it was not this one before.

        Raises `FallbackError`, and all is as it was.
        """
        if stream == self._stream:
            return False
        if self._stream is not None and not self._may_leave():
            raise FallbackError(OTHER_STREAM)
        self.move(stream)
        return True

    def expect(self, stream: int) -> None:
        """Raise `FallbackError` if `enter` would: nothing need be prepared for a launch there. Holds no lock, and says nothing of what comes later."""
        if self._stream not in (None, stream) and not self._may_leave():
            raise FallbackError(OTHER_STREAM)

    def move(self, stream: int) -> None:
        """Go on, on the current stream, now that nothing is left to do on another; raises nothing."""
        self._has_ended = bool  # never, if it cannot be watched
        with contextlib.suppress(Exception):
            self._has_ended = self._watch()
        self._stream = stream

    def leave(self) -> None:
        """Let any stream be next: nothing has been done since it was entered."""
        self._stream = None

    def _may_leave(self) -> bool:
        # What CUDA says of a call of the user's must surface in theirs.
        with contextlib.suppress(Exception), self._driver.relaxed():
            return self._has_ended()
        return False
