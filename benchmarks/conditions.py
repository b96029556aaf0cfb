"""What happens around the measurements of a process. Whoever shares a machine between processes has conditions of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Conditions:
    """A process that has the machine for itself: nothing to wait for, and nothing to measure again."""

    def before_compiling(self) -> None:
        """Return when this process may compile."""

    def before_timing(self) -> None:
        """Return when nothing else runs, until this process ends."""

    def timed(self, measure: Callable[[], T]) -> T:
        """Return what is measured; it may be measured several times, of which the last one counts."""
        return measure()

    def note(self) -> str:
        """Return what is to be said of the timings; empty: nothing."""
        return ""
