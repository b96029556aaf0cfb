"""Puts off signal handlers of the program, and tells exceptions that they have raised from those of PyGraph's own code.

Python runs handlers in the main thread, between any two instructions: also while PyGraph records a graph. Job queues raise the end of a
time limit so, and schedulers that of a job. Such an exception is the program's, and is neither counted nor kept from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

_TIMERS = frozenset({signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF})
"""Signals by which programs limit or sample time: their handlers run at once."""
_ACTION_BYTES = 1024
"""More than the size of C's `struct sigaction`."""


@contextlib.contextmanager
def handlers_put_off() -> Iterator[None]:
    """Run the program's signal handlers after this block, in the main thread, rather than within it; what they raise is raised then.

    A handler that saves a checkpoint within a capture of a CUDA graph would be captured, and not run. Python's KeyboardInterrupt is not
    put off, nor are timers; nor is a signal that comes once more, as from somebody who does not want to wait. A block within another
    does nothing.
    """
    put_off = _PutOff()
    try:
        if threading.current_thread() is threading.main_thread():
            put_off.begin()
        yield
    finally:
        put_off.end()


class _PutOff:
    """The handler of all signals within one block."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []
        self._is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # In a child that another thread has forked meanwhile, this block never ends.
        if self._is_over or number in self._came or os.getpid() != self._process:
            self._handlers[number](number, frame)
        else:
            self._came.append(number)

    def begin(self) -> None:
        """Take the place of the program's handlers."""
        for each in signal.valid_signals() - _TIMERS:
            handler = signal.getsignal(each)
            if (
                callable(handler)
                and not isinstance(handler, _PutOff)
                and handler != signal.default_int_handler
            ):
                self._handlers[each] = handler
                _exchange(each, self)

    def end(self) -> None:
        """Put the program's handlers back, and call those of signals that came."""
        self._is_over = True  # Ctrl-C or a timer may end what follows
        try:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) is self:
                    _exchange(number, handler)
        finally:
            _run([(self._handlers[number], number) for number in self._came])


def _run(handlers: list[tuple[Any, int]]) -> None:
    """Call handlers of signals that came, all of them: an exception of one is raised after the others."""
    # No variable may hold an exception that is raised from its frame, or a frame: it would keep itself, and all that the callers' variables
    # hold, until Python's garbage collector runs.
    if handlers:
        handler, number = handlers[0]
        try:
            # Not the frame that the signal interrupted, which would have kept tensors of a capture.
            handler(number, inspect.currentframe())
        finally:
            _run(handlers[1:])


def _exchange(number: int, handler: Any) -> None:
    """Have Python call another handler for a signal. All else that the process has set for it stays, as whether calls are begun again."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    libc = _libc()
    is_known = libc.sigaction(number, None, action) == 0
    signal.signal(number, handler)
    if is_known:
        libc.sigaction(number, action, None)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def raised_by_handler(error: BaseException | None) -> bool:
    """Return whether a signal handler in Python has raised `error`, or has called what did. To be asked where it is caught."""
    trace = None if error is None else error.__traceback__
    codes: set[CodeType] = set()
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return not codes.isdisjoint(_codes_of_handlers())


def _codes_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler) and not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
            handler = type(handler).__call__  # an object that can be called
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None:
            yield code
