"""Keeps exceptions of our own code from the user's program."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pygraphd.client.common import log
from pygraphd.client.common.signals import raised_by_handler

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.common.report import Report

_T = TypeVar("_T")
MAX_CHARACTERS = 200


class guarded:  # noqa: N801 - it is used as `contextlib.suppress` is
    """Runs our own code, whose exceptions are counted: `with guarded(report, what):`, or `result = guarded(report, what)(action)`.

    An exception ends the block, or has the call return None. It is counted in the report (None: written to standard error) as `what`, its
    type, and if `in_full` its text; each text is counted apart. Has no state of its own, so threads may share it.
    """

    def __init__(self, report: Report | None, what: str, *, in_full: bool = False) -> None:
        self._fail = log.say if report is None else report.count_failure
        self._what, self._in_full = what, in_full

    def __call__(self, action: Callable[[], _T]) -> _T | None:
        """Return the result of `action`, or None if it raises."""
        with self:
            return action()
        return None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        # KeyboardInterrupt and SystemExit are the program's, and so is an exception of its signal handlers.
        if not isinstance(error, Exception) or raised_by_handler(error):
            return False
        text = f": {error}" if self._in_full else ""
        self._fail(f"{self._what}: {type(error).__name__}{text}"[:MAX_CHARACTERS])
        return True
