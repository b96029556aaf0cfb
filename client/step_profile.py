"""How much of a program's step runs inside CUDA graphs: one step is found among its calls, and profiled (`PYGRAPH_COVERAGE=1`).

A step goes from a call of one compiled graph to the next call of it: of the graph that is called least often, as others may be the
layers of a model. Off by default: once CUPTI listens, launches take longer for the rest of the process.
"""

from __future__ import annotations

import enum
import json
import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.client.coverage import count
from pygraphd.client.policy import NO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.client.report import Report

SETTLED_CALLS = 24
"""Calls of each graph, on average, within which none was measured or decided: then none is any more."""
SEEN_OFTEN = 3
"""Calls of each graph, after which it is known which comes least often."""
MOST_CALLS = 4_096
"""Of a step, and while it is looked for which graph comes least often."""

NO_STEP = "the program ended before a step was profiled"
NO_END = f"no graph came back within {MOST_CALLS:,} calls"
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
    """A profile of one step, after one that is not kept."""

    def why_not(self) -> str | None:
        """Return why none can be begun now, as far as that may pass."""

    def begin(self) -> None:
        """Begin the step that is not kept; raises NoTraceError."""

    def keep(self) -> None:
        """Begin the step that is."""

    def end(self) -> list[dict[str, Any]]:
        """Return the events of the step that was kept."""

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
        if self.state is State.DONE or not self._is_in_thread():
            return
        self._calls += 1
        try:
            self._steps[self.state](graph)
        except NoTraceError as error:
            self._give_up(str(error))
        except Exception as error:  # noqa: BLE001 - it is the user's call
            self._give_up(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End a profile that is under way; never raises."""
        if self.state is not State.DONE:
            self._give_up(NO_STEP)

    def _is_in_thread(self) -> bool:
        if self._thread is None:
            self._thread = threading.get_ident()
        return threading.get_ident() == self._thread

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
        if min(self._counts.values()) >= SEEN_OFTEN or self._calls >= MOST_CALLS:
            often = {each: calls for each, calls in self._counts.items() if calls >= SEEN_OFTEN}
            if not often:
                self._give_up(NO_END)
                return
            self._leader = min(often, key=lambda each: often[each])
            self._enter(State.WAIT)

    def _begin(self, graph: int) -> None:
        if self._comes_back(graph) and self._trace.why_not() is None:
            self._trace.begin()
            self._enter(State.WARM_UP)

    def _keep(self, graph: int) -> None:
        if self._comes_back(graph):
            self._trace.keep()
            self._enter(State.RECORD)

    def _end(self, graph: int) -> None:
        if self._comes_back(graph):
            coverage = count(self._trace.end())
            self._leave(coverage.counts() if coverage is not None else {"reason": NO_KERNEL})

    def _comes_back(self, graph: int) -> bool:
        """Whether this graph begins a step."""
        if graph != self._leader and self._calls >= MOST_CALLS:
            self._give_up(NO_END)
        return graph == self._leader

    def _give_up(self, reason: str) -> None:
        self._leave({"reason": reason[:200]})

    def _leave(self, answer: dict[str, Any]) -> None:
        self._report.coverage = answer
        self._enter(State.DONE)
        try:
            self._trace.close()
        except Exception as error:  # noqa: BLE001 - it is the user's call
            self._report.fail(f"coverage: {type(error).__name__}")


class TorchTrace:
    """By `torch.profiler`, of the current device."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def why_not(self) -> str | None:
        """See `Trace`."""
        import torch

        from pygraphd.client import _torch

        if _torch.profiler_is_on():
            return "a profiler of the user's is on"
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return "a capture is under way" if is_capturing else None

    def begin(self) -> None:
        """See `Trace`."""
        import torch
        from torch import profiler

        if not torch.cuda.is_available():
            raise NoTraceError(NO_DEVICE)
        # Graphs that were made before CUPTI is taken down and set up again may crash the process.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        self._folder = tempfile.TemporaryDirectory(prefix="pygraph-trace-")
        self._profile = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA],
            schedule=profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            acc_events=True,  # it warns otherwise that there is one cycle only
            on_trace_ready=lambda done: done.export_chrome_trace(str(self._file)),
        )
        self._synchronize()
        self._profile.start()

    def keep(self) -> None:
        """See `Trace`."""
        self._synchronize()
        self._profile.step()

    def end(self) -> list[dict[str, Any]]:
        """See `Trace`."""
        self._synchronize()
        self._profile.step()
        events: list[dict[str, Any]] = json.loads(self._file.read_text())["traceEvents"]
        return events

    def close(self) -> None:
        """See `Trace`."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "trace.json"

    def _synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()
