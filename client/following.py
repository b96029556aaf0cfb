"""What runs a graph that another rank measures: launches it, and looks now and then whether there is a decision.

A look costs a question to the group's store, so the intervals grow with the time that was waited. The graphs of one family, a
forward and its backward, look in the same step, and a backward only after its forward: a step that is part captured
and part launched has PyTorch's trees record anew. Knows nothing of torch.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client._torch import Runnable
    from pygraphd.client.report import Report
    from pygraphd.schema.messages import Decision

FIRST_S = 0.1
"""The shortest interval between two looks."""
GROWTH = 0.5
"""The interval as a share of the time waited so far."""
LONGEST_S = 10.0
"""The longest interval: two minutes take some two dozen looks."""
PATIENT_CALLS = 100
"""Calls before time counts: the rank that measures needs two dozen of its own, however long they take."""
COMPILING_CALLS = 2
"""First calls of a graph, which may be minutes apart while others are being compiled. Waiting begins after them."""


class Pace:
    """When the followers of one family look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None
        self._due = 0.0
        self._round = 0
        self._members: list[weakref.ref[Follower]] = []  # one that is waiting goes with its model

    def join(self, follower: Follower) -> None:
        """Count a follower in."""
        with self._lock:
            self._members.append(weakref.ref(follower))

    def leave(self, follower: Follower) -> None:
        """Count out a follower that has its decision; the others are to look at once."""
        with self._lock:
            self._members = [each for each in self._members if each() not in {None, follower}]
            self._round += 1

    def round(self, follower: Follower) -> int:
        """Return the number of the round that now is: each follower looks once in a round.

        A new one begins only with the first follower, which is the first of a step: else it might begin in the middle.
        """
        now = self.clock()
        with self._lock:
            if self._began is None:
                self._began = now
            if now >= self._due and next(iter(self._alive()), None) is follower:
                self._round += 1
                self._due = now + min(LONGEST_S, max(FIRST_S, GROWTH * (now - self._began)))
            return self._round

    def may_look(self, follower: Follower) -> bool:
        """Return whether a follower need not wait for those before it in the step."""
        if not follower.is_backward:
            return True
        with self._lock:
            return all(each.is_backward for each in self._alive())

    def _alive(self) -> list[Follower]:
        return [alive for each in self._members if (alive := each()) is not None]


class Follower:
    """A graph that another rank measures; call it with the list of inputs that Inductor hands over.

    `ask` takes the seconds waited and returns the decision, if there is one. `deploy` then puts what was decided in this
    object's place, and returns it.
    """

    def __init__(
        self,
        launch: Runnable,
        pace: Pace,
        ask: Callable[[float], Decision | None],
        deploy: Callable[[Follower, Decision], Runnable],
        report: Report,
        *,
        is_backward: bool,
    ) -> None:
        self._call: Runnable = launch
        self._pace = pace
        self._ask = ask
        self._deploy: Callable[[Follower, Decision], Runnable] | None = deploy
        self._report = report
        self.is_backward = is_backward
        self._calls = 0
        self._began: float | None = None
        self._seen_round = 0
        self._looking = threading.Lock()
        pace.join(self)

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if self._deploy is not None:
            self._follow()
        return self._call(inputs)

    def _follow(self) -> None:
        self._calls += 1
        if self._calls <= COMPILING_CALLS or not self._looking.acquire(blocking=False):
            return  # not now, or another thread is at it
        try:
            if self._is_due():
                self._look()
        except Exception as error:  # noqa: BLE001 - ours, in the user's call
            self._report.fail(f"ranks: following: {type(error).__name__}")
        finally:
            self._looking.release()

    def _is_due(self) -> bool:
        return self._pace.round(self) != self._seen_round and self._pace.may_look(self)

    def _look(self) -> None:
        self._seen_round = self._pace.round(self)
        deploy = self._deploy
        decision = self._ask(self._waited_s()) if deploy is not None else None
        if deploy is None or decision is None:
            return
        self._deploy = None  # it holds the candidates that were not chosen
        self._pace.leave(self)
        self._call = deploy(self, decision)

    def _waited_s(self) -> float:
        """Return for how long it has been looking, or 0 as long as a leader could not have measured in so many calls."""
        now = self._pace.clock()
        if self._began is None:
            self._began = now
        return now - self._began if self._calls > PATIENT_CALLS else 0.0
