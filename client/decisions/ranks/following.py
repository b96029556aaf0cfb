"""Runs a graph that another rank measures: as KERNELS, with polls for the decision. Needs no torch.

A poll asks the group's store, so the intervals grow with the time that was waited.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from pygraphd.client.common.backoff import Backoff
from pygraphd.client.common.guard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.schema.messages import Decision

FIRST_S = 0.1
"""Seconds between the first two polls."""
GROWTH = 1.5
"""Factor from each pause between polls to the next."""
LONGEST_S = 10.0
"""Longest time in seconds between two polls, so that two minutes take about two dozen polls."""
PATIENT_CALLS = 100
"""First calls during which waited time does not count: the leader needs two dozen for a trial, however long they take."""
COMPILING_CALLS = 2
"""First calls of a graph, which may be minutes apart while others are being compiled. Waiting begins after them."""


class Follower:
    """Runs a graph that another rank measures; call it with Inductor's list of inputs.

    `ask` takes the seconds waited and returns the decision, or None. `deploy` puts the decided callable in this object's place, and
    returns it.
    """

    def __init__(
        self,
        launch: Runnable,
        ask: Callable[[float], Decision | None],
        deploy: Callable[[Decision], Runnable],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call: Runnable = launch
        self._ask = ask
        self._deploy: Callable[[Decision], Runnable] | None = deploy
        self._report = report
        self._clock = clock
        self._calls = 0
        self._began = 0.0
        self._polls: Backoff | None = None
        self._polling = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if self._deploy is not None:
            self._follow()
        return self._call(inputs)

    def _follow(self) -> None:
        self._calls += 1
        if self._calls <= COMPILING_CALLS or not self._polling.acquire(blocking=False):
            return  # not now, or another thread is at it
        try:
            guarded(self._report, "ranks: following")(self._poll)
        finally:
            self._polling.release()

    def _poll(self) -> None:
        now, deploy = self._clock(), self._deploy
        if deploy is None or (self._polls is not None and not self._polls.is_due(now)):
            return
        if self._polls is None:
            self._began, self._polls = now, Backoff(FIRST_S, GROWTH, LONGEST_S, now=now)
        else:
            self._polls.postpone(now)
        # A leader could not have measured in fewer calls.
        decision = self._ask(now - self._began if self._calls > PATIENT_CALLS else 0.0)
        if decision is not None:
            self._deploy = None  # it holds the candidates that were not chosen
            self._call = deploy(decision)
