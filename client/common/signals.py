"""Tells exceptions that a signal handler of the program has raised from those of PyGraph's own code.

Python runs handlers in the main thread, between any two instructions: also while PyGraph records a graph. Job queues raise the end of a
time limit so, and schedulers that of a job. Such an exception is the program's, and is neither counted nor kept from it.
"""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType


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
