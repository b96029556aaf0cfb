"""How much of a program's step runs inside CUDA graphs: one step is found among its calls, and profiled (`PYGRAPH_COVERAGE=1`).

A step goes from a call of one compiled graph to the next call of it: of the graph that is called least often, as others may be the
layers of a model. Off by default: once CUPTI listens, launches take longer for the rest of the process. What is profiled is told of in
`torch_trace.py`.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.client.coverage import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.client.report import Report

SETTLED_CALLS = 24
"""Calls of each graph, on average, within which none was measured or decided: then none is any more."""
SEEN_OFTEN = 3
"""Calls of each graph, after which it is known which comes least often."""
LEAST_CALLS = 128
"""Calls that are counted at least: the layers of a model may share a graph, and others come after them."""
MOST_CALLS = 4_096
"""Calls within which each graph should have come so often, and the one that begins a step come back."""
MOST_CALLS_OF_STEP = 1_024
"""While the profiler is on,"""
MOST_S = 20.0
"""and how long it may be, at the next call of a graph: it keeps each operator in memory."""

NO_STEP = "the program ended before a step was profiled"
NO_END = f"no graph came back within {MOST_CALLS:,} calls"
TOO_LONG = f"a step took more than {MOST_CALLS_OF_STEP:,} calls of graphs, or {MOST_S:.0f} s"
OTHER_PROFILER = "the program profiles itself"
NO_KERNEL = "the profiler saw no kernel"


class State(enum.Enum):
    """How far it has come."""

    SETTLE = "graphs are still being decided"
    COUNT = "calls are counted, to tell which graph comes least often"
    WAIT = "that graph is waited for"
    WARM_UP = "a step sets the profiler up"
    RECORD = "the step that counts is under way"
    DONE = "there is an answer, or there will be none"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.SETTLE: frozenset({State.COUNT, State.DONE}),
    State.COUNT: frozenset({State.WAIT, State.DONE}),
    State.WAIT: frozenset({State.WARM_UP, State.DONE}),
    State.WARM_UP: frozenset({State.RECORD, State.DONE}),
    State.RECORD: frozenset({State.DONE}),
    State.DONE: frozenset(),
}


class NoTraceError(Exception):
    """There will be no profile; the text is the reason."""


class Trace(Protocol):
    """A profile of one step, after one that is not kept. All but `why_not` is called on one thread."""

    def why_not(self) -> str | None:
        """Return why nothing may be done now: it is within what must not be disturbed."""

    def begin(self) -> None:
        """Begin the step that is not kept; raises NoTraceError."""

    def keep(self) -> None:
        """Begin the step that is; raises NoTraceError."""

    def end(self) -> list[dict[str, Any]]:
        """Return the events of the step that was kept; raises NoTraceError."""

    def close(self) -> None:
        """Let go of what was begun."""


class StepProfile:
    """Told of every call of a compiled graph before it runs. Calls of other threads than the first one's are parts of a step."""

    def __init__(self, trace: Trace, report: Report, progress: Callable[[], object]) -> None:
        """Write the coverage by `trace`, or why there is none, to `report`; `progress` changes while graphs are being decided."""
        self.state = State.SETTLE
        self._trace = trace
        self._report = report
        self._progress = progress
        self._latest: object = None
        self._thread: int | None = None
        self._calls = 0
        self._counts: Counter[int] = Counter()
        self._leader = 0
        self._lock = threading.Lock()
        self._must_close = False
        self._began = 0.0
        self._steps: Mapping[State, Callable[[int], None]] = {
            State.SETTLE: self._settle,
            State.COUNT: self._count,
            State.WAIT: self._begin,
            State.WARM_UP: self._keep,
            State.RECORD: self._end,
        }
        report.coverage = {"reason": NO_STEP}

    def called(self, graph: int) -> None:
        """Note a call of the graph of this number; never raises."""
        if self.state is State.DONE and not self._must_close:
            return
        if not self._is_in_thread():
            return
        # Another thread may be closing it; and what this does may call a graph of the user's.
        if self._lock.acquire(blocking=False):
            try:
                self._called(graph)
            finally:
                self._lock.release()

    def _called(self, graph: int) -> None:
        try:
            if self.state is State.DONE:
                self._let_go()
                return
            self._calls += 1
            self._steps[self.state](graph)
        except NoTraceError as error:
            self._give_up(str(error))
        except Exception as error:  # noqa: BLE001 - it is the user's call
            self._give_up(f"{type(error).__name__}: {error}")

    def give_way(self) -> None:
        """End it before another profiler begins: there is one in a process; never raises."""
        self._end_with(OTHER_PROFILER)

    def close(self) -> None:
        """End a profile that is under way; never raises."""
        self._end_with(NO_STEP)

    def _end_with(self, reason: str) -> None:
        # Not if we are the ones who are at it.
        if not self._is_done() and self._lock.acquire(blocking=False):
            try:
                if not self._is_done():
                    self._give_up(reason)
            finally:
                self._lock.release()

    def _is_done(self) -> bool:
        return self.state is State.DONE

    def _is_in_thread(self) -> bool:
        """Whether this is the first thread to call, and may be disturbed now."""
        if self._thread not in {None, threading.get_ident()}:
            return False
        try:
            reason = self._trace.why_not()
        except Exception as error:  # noqa: BLE001 - the GPU has failed, and says so to whoever asks it something
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            self._thread = threading.get_ident()
        return reason is None

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a profile cannot go from {self.state.name} to {state.name}")
        self.state = state
        self._calls = 0

    def _settle(self, graph: int) -> None:
        self._counts[graph] += 1
        progress = self._progress()
        if progress != self._latest:
            self._latest, self._calls = progress, 0
            self._counts.clear()
        elif self._calls >= SETTLED_CALLS * len(self._counts):
            self._counts = Counter(dict.fromkeys(self._counts, 0))
            self._enter(State.COUNT)

    def _count(self, graph: int) -> None:
        self._counts[graph] += 1
        enough = self._calls >= LEAST_CALLS and min(self._counts.values()) >= SEEN_OFTEN
        if enough or self._calls >= MOST_CALLS:
            often = {each: calls for each, calls in self._counts.items() if calls >= SEEN_OFTEN}
            if not often:
                self._give_up(NO_END)
                return
            self._leader = min(often, key=lambda each: often[each])
            self._enter(State.WAIT)

    def _begin(self, graph: int) -> None:
        if self._comes_back(graph, MOST_CALLS, NO_END):
            self._must_close = True
            self._began = time.monotonic()
            self._trace.begin()
            self._enter(State.WARM_UP)

    def _keep(self, graph: int) -> None:
        if self._comes_back(graph, MOST_CALLS_OF_STEP, TOO_LONG):
            self._began = time.monotonic()
            self._trace.keep()
            self._enter(State.RECORD)

    def _end(self, graph: int) -> None:
        if self._comes_back(graph, MOST_CALLS_OF_STEP, TOO_LONG):
            coverage = count(self._trace.end())
            self._leave(coverage.counts() if coverage is not None else {"reason": NO_KERNEL})

    def _comes_back(self, graph: int, most_calls: int, otherwise: str) -> bool:
        """Whether this graph begins a step; raises NoTraceError if it is long in coming."""
        is_on = self.state is not State.WAIT
        if (graph != self._leader and self._calls >= most_calls) or (
            is_on and time.monotonic() - self._began > MOST_S
        ):
            raise NoTraceError(otherwise)
        return graph == self._leader

    def _give_up(self, reason: str) -> None:
        self._leave({"reason": reason[:200]})

    def _leave(self, answer: dict[str, Any]) -> None:
        self._report.coverage = answer
        self._enter(State.DONE)
        # Where it was begun it has to be ended: if not here, at that thread's next call.
        if threading.get_ident() == self._thread:
            self._let_go()

    def _let_go(self) -> None:
        if not self._must_close:
            return
        self._must_close = False
        try:
            self._trace.close()
        except Exception as error:  # noqa: BLE001 - it is the user's call
            self._report.fail(f"coverage: {type(error).__name__}")
