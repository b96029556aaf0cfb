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
    put off, nor are timers; nor is a signal that comes once more, as from somebody who does not want to wait.
    """
    came: list[int] = []
    handlers: dict[int, Any] = {}
    process = os.getpid()
    is_over = False

    def note(number: int, frame: FrameType | None) -> None:
        # In a child that another thread has forked meanwhile, this block never ends.
        if is_over or number in came or os.getpid() != process:
            handlers[number](number, frame)
        else:
            came.append(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in _put_off():
                handlers[number] = signal.getsignal(number)
                _exchange(number, note)
        yield
    finally:
        is_over = True  # Ctrl-C or a timer may end what follows
        try:
            for number, handler in handlers.items():
                if signal.getsignal(number) is note:
                    _exchange(number, handler)
        finally:
            _run([(handlers[number], number) for number in came])


def _run(handlers: list[tuple[Any, int]]) -> None:
    """Call handlers of signals that came, all of them: an exception of one is raised after the others."""
    with contextlib.ExitStack() as stack:
        for handler, number in reversed(handlers):
            stack.callback(_call, handler, number)


def _call(handler: Any, number: int) -> None:
    # Not the frame that the signal interrupted, which would have kept tensors of a capture. Nor may a variable hold this one: it would
    # keep itself, and the frames of all callers, until Python's garbage collector runs.
    handler(number, inspect.currentframe())


def _put_off() -> list[int]:
    handled = {each: signal.getsignal(each) for each in signal.valid_signals() - _TIMERS}
    return [
        number
        for number, handler in handled.items()
        if callable(handler) and handler is not signal.default_int_handler
    ]


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
