"""The conditions of a process's measurements. A program that runs several processes on a machine passes conditions of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Conditions:
    """A process that has the machine for itself: it waits for nothing, and measures everything once."""

    def before_compiling(self) -> None:
        """Return when this process may compile."""

    def first_step(self, measure: Callable[[], float]) -> float | None:
        """Run the first step, which returns its seconds; None: other processes have made it longer."""
        return measure()

    def before_timing(self) -> None:
        """Return when nothing else runs, until `after_timing` or the end of this process."""

    def after_timing(self) -> None:
        """Return when no other process is timed, so that this one may disturb others."""

    def timed(self, measure: Callable[[], T]) -> T:
        """Call `measure`, maybe several times, and return its last result."""
        return measure()

    def note(self) -> str:
        """Return a remark on the timings for the record; empty if there is none."""
        return ""
