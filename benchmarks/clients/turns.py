"""Processes of a client compile side by side, and are timed one at a time: each says when it has compiled, and waits for its turn.

A turn ends when the process says that it has been timed, or has ended. `examples/clients/measuring.py` has the other side.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VARIABLE = "MEASURING_TURN"
"""For a process: the file whose neighbours say whose turn it is."""
_POLL_S = 0.05
_EXIT_S = 30.0


class Turn:
    """The turn of one process, which lasts as long as the parent says: `stop` ends the process."""

    def __init__(self, file: Path) -> None:
        self.environ = {VARIABLE: str(file)}
        self.stop = threading.Event()
        self.ended = threading.Event()
        """To be set when the process has ended."""
        self.late = ""
        """Why the process had to be stopped; empty if it was not late."""
        self._file = file

    @property
    def has_compiled(self) -> bool:
        """Whether nobody has to wait for the process before the first turn."""
        return self._said("ready") or self.ended.is_set()

    @property
    def is_over(self) -> bool:
        """Whether the next one may be timed."""
        return self._said("timed") or self.ended.is_set()

    def begin(self) -> None:
        """Let the process go on."""
        self._file.with_name(f"{self._file.name}.go").touch()

    def give_up(self, why: str) -> None:
        """Stop the process, which is late."""
        self.late = self.late or why
        self.stop.set()

    def _said(self, what: str) -> bool:
        return self._file.with_name(f"{self._file.name}.{what}").exists()


def take_turns(turns: Sequence[Turn], stop: threading.Event, compile_s: float, timed_s: float) -> None:
    """Let processes be timed one after the other, and return when all are to have ended; when `stop` is set, stop them.

    They get `compile_s` seconds for all to have compiled, and each `timed_s` for its turn.
    """
    _wait(turns, stop, compile_s, "has_compiled", "not compiled")
    for turn in turns:
        turn.begin()
        _wait([turn], stop, timed_s, "is_over", "not timed")
    # A process whose turn is over has but to exit.
    end = time.monotonic() + _EXIT_S
    while not stop.is_set() and time.monotonic() < end and not all(each.ended.is_set() for each in turns):
        time.sleep(_POLL_S)
    for turn in turns:
        if not turn.ended.is_set():
            turn.give_up(f"it has not ended {_EXIT_S:.0f} s after its result")


def _wait(turns: Sequence[Turn], stop: threading.Event, limit_s: float, what: str, late: str) -> None:
    end = time.monotonic() + limit_s
    while not stop.is_set() and (left := [each for each in turns if not getattr(each, what)]):
        if time.monotonic() > end:
            for turn in left:
                turn.give_up(f"{late} after {limit_s:.0f} s")
            end += limit_s  # for them to end
        time.sleep(_POLL_S)
