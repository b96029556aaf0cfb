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
COMPILING_CALLS = 2
"""First calls of a graph, which may be minutes apart while others are being compiled. Waiting begins after them."""


class Pace:
    """When the followers of one family look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._due = 0.0
        self._round = 0
        self._members: list[weakref.ref[Follower]] = []  # one that is waiting goes with its model
        self._open_forwards = 0

    def join(self, follower: Follower, *, is_backward: bool) -> None:
        """Count a follower in."""
        self._members.append(weakref.ref(follower))
        self._open_forwards += not is_backward

    def leave(self, follower: Follower, *, is_backward: bool) -> None:
        """Count out a follower that has its decision; the others are to look at once."""
        self._members.remove(weakref.ref(follower))
        self._open_forwards -= not is_backward
        self._round += 1

    def round(self, follower: Follower) -> int:
        """Return the number of the round that now is: each follower looks once in a round.

        A new one begins only with the first follower, which is the first of a step: else it might begin in the middle.
        """
        now = self._clock()
        if self._began is None:
            self._began = now
        if now >= self._due and self._first() is follower:
            self._round += 1
            self._due = now + min(LONGEST_S, max(FIRST_S, GROWTH * (now - self._began)))
        return self._round

    def _first(self) -> Follower | None:
        while self._members:
            if (first := self._members[0]()) is not None:
                return first
            del self._members[0]
        return None

    def waited_s(self) -> float:
        """Return for how long the family has been waiting."""
        return 0.0 if self._began is None else self._clock() - self._began

    def may_look(self, *, is_backward: bool) -> bool:
        """Return whether a follower need not wait for those before it in the step."""
        return not is_backward or self._open_forwards == 0


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
        self._is_backward = is_backward
        self._calls = 0
        self._seen_round = 0
        self._looking = threading.Lock()
        pace.join(self, is_backward=is_backward)

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if self._deploy is not None:
            self._follow()
        return self._call(inputs)

    def _follow(self) -> None:
        if self._calls < COMPILING_CALLS:
            self._calls += 1
            return
        if not self._is_due() or not self._looking.acquire(blocking=False):
            return  # not now, or another thread is at it
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - ours, in the user's call
            self._report.fail(f"ranks: following: {type(error).__name__}")
        finally:
            self._looking.release()

    def _is_due(self) -> bool:
        return self._pace.round(self) != self._seen_round and self._pace.may_look(
            is_backward=self._is_backward
        )

    def _look(self) -> None:
        self._seen_round = self._pace.round(self)
        deploy = self._deploy
        decision = self._ask(self._pace.waited_s()) if deploy is not None else None
        if deploy is None or decision is None:
            return
        self._deploy = None  # it holds the candidates that were not chosen
        self._pace.leave(self, is_backward=self._is_backward)
        self._call = deploy(self, decision)
