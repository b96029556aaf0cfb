"""When deployed graphs are looked at again: now and then, for as long as the process runs. Knows nothing of torch.

Between two looks nothing of ours is in the way of a call. A look puts in place what times a few calls, and takes itself out
again (`checking.Checked`); who decides what becomes of the answer is whoever asked for the look.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.checking import Jury
from pygraphd.client.retrials import Retrials

if TYPE_CHECKING:
    from pygraphd.client.report import Report

Look = Callable[[int, Jury], None]
"""Has one deployed graph, by its number, be timed; a forward and its backward are found out about together, by one jury."""


class Drift:
    """The deployed graphs of one process, and a thread that sleeps until they are to be looked at."""

    def __init__(self, period_s: float, report: Report) -> None:
        """Look every `period_s` seconds; 0: never."""
        self._period_s = period_s
        self._report = report
        self._numbers = itertools.count()
        self._looks: dict[int, _Member] = {}
        self._retrials = Retrials(report)
        self._round = 0
        self._schedules: dict[int, _Schedule] = {}
        self._ended = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, family: int, look: Look, has_rivals: Callable[[], bool] = lambda: False) -> int:
        """Look at one more graph from now on; return a number for `forget`.

        `has_rivals` says whether there is anything to hold it against that a look does not; see `Retrials`.
        """
        number = next(self._numbers)
        if self._period_s and not self._ended.is_set() and self._is_running():
            self._looks[number] = _Member(family, look, has_rivals)
        return number

    def forget(self, number: int) -> None:
        """Look at a graph no more: it is gone, or is being measured."""
        self._looks.pop(number, None)

    def drifted(self, number: int) -> bool:
        """Look at a graph no more, and at its family half as often from now on; return whether it is to be measured anew.

        Costs that go up and down by themselves must not be measured anew for ever. A graph that is gone, or in a session that
        has ended, is left as it is.
        """
        member = self._looks.pop(number, None)
        if member is None:
            return False
        schedule = self._schedules.setdefault(member.family, _Schedule())
        if schedule.drifted_in != self._round:  # not noted for its other half yet
            schedule.drifted_in = self._round
            schedule.every *= 2
            schedule.due = self._round + schedule.every
        return True

    def retried(self, number: int) -> bool:
        """Look at a graph no more, as it is its family's turn; return whether it is to be measured anew, as `drifted` does."""
        member = self._looks.pop(number, None)
        if member is None:
            return False
        self._retrials.begun(member.family, self._round)
        return True

    def changed(self, family: int) -> None:
        """Note that a graph has come to run otherwise."""
        self._retrials.changed(family)

    def look(self) -> None:
        """Have every graph that is due be timed on its next calls."""
        self._round += 1
        juries: dict[int, Jury] = {}
        retried: list[Jury] = []
        for number, member in self._looks.copy().items():  # a model may go at any time
            family = member.family
            schedule = self._schedules.setdefault(family, _Schedule())
            if schedule.due > self._round and family not in juries:
                continue
            schedule.due = self._round + schedule.every
            try:
                if family not in juries:
                    juries[family] = Jury()
                    if self._is_turn_of(family):
                        retried.append(juries[family])
                member.look(number, juries[family])
            except Exception as error:  # noqa: BLE001 - in a thread of ours, it would be printed
                juries[family].be_partial()
                self.forget(number)
                self._report.fail(f"looking again: {type(error).__name__}")
        for jury in retried:
            jury.retry()

    def _is_turn_of(self, family: int) -> bool:
        """Whether a family is to be measured anew whatever is found; what fails here is no reason not to look at it."""
        members = self._looks.copy().values()
        have_rivals = (each.has_rivals for each in members if each.family == family)
        try:
            return self._retrials.is_due(family, self._round, have_rivals)
        except Exception as error:  # noqa: BLE001 - in a thread of ours, it would be printed
            self._report.fail(f"measuring anew: {type(error).__name__}")
            return False

    @property
    def is_over(self) -> bool:
        """Whether nothing will be looked at any more, since the session has ended."""
        return self._ended.is_set()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._looks.clear()

    def _is_running(self) -> bool:
        """Start the thread, if there is none yet; whether there is one."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pygraph-drift", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the process is ending
                    self._report.fail("looking again: there is no thread to be had")
                    return False
                self._thread = thread
        return True

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - it would be printed
                self._report.fail(f"looking again: {type(error).__name__}")


@dataclass(frozen=True, slots=True)
class _Member:
    """One deployed graph; see `add`."""

    family: int
    look: Look
    has_rivals: Callable[[], bool]


@dataclass(slots=True)
class _Schedule:
    """When a family is looked at, in rounds."""

    every: int = 1
    due: int = 0
    drifted_in: int = 0
