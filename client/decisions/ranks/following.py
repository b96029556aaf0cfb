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
UNLED_CALLS = 10
"""First calls after which this rank may measure a graph that no rank measures. By then the leader has compiled its graphs, and the other
followers wait for long enough to get the result."""
COMPILING_CALLS = 2
"""First calls of a graph, which may be minutes apart while others are being compiled. Waiting begins after them."""


def _never(_: float) -> None:
    """Have another rank measure, however long that takes."""


class Follower:
    """Runs a graph that another rank measures; call it with Inductor's list of inputs.

    `ask` takes the seconds waited and returns the decision, or None. `deploy` puts the decided callable in this object's place, and
    returns it. `lead` takes the seconds waited; if no rank measures the graph, it has this one do so, and returns the callable for that.
    """

    def __init__(
        self,
        run_kernels: Runnable,
        ask: Callable[[float], Decision | None],
        deploy: Callable[[Decision], Runnable],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        lead: Callable[[float], Runnable | None] = _never,
    ) -> None:
        self._call: Runnable = run_kernels
        self._ask = ask
        self._deploy: Callable[[Decision], Runnable] | None = deploy
        self._lead = lead
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
        waited_s = now - self._began
        decision = self._ask(waited_s if self._calls > PATIENT_CALLS else 0.0)
        if decision is not None:
            self._end()
            self._call = deploy(decision)
        elif self._calls > UNLED_CALLS and (run := self._lead(waited_s)) is not None:
            self._end()
            self._call = run

    def _end(self) -> None:
        # These hold the candidates that are not chosen.
        self._deploy = None
        self._lead = _never
