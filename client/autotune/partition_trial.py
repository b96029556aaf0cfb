"""One captured region of a compiled graph, from its first call to its deployment. Everything about a state is here.

A `Region` stands where Inductor would put PyTorch's own CUDA Graph. Once it is deployed it takes itself out of the way. It is long
because all that a region may do is a matter of its state.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client.autotune.trial import Trial
from pygraphd.client.backend import headroom
from pygraphd.client.common import log
from pygraphd.client.common.guard import guarded
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.leases import Turn
from pygraphd.client.decisions.ranks.consensus import ALONE, Part
from pygraphd.schema import policy
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Measurement
from pygraphd.schema.policy import decide
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.client.autotune.candidates import Candidates
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report


class State(enum.Enum):
    """Where a region is in its life."""

    WARM_UP = "launched without timing: kernels or our helper are still being compiled, or an earlier program was too short to tell"
    WAIT = "launched while another process measures this graph"
    MEASURE = "real calls alternate among the deployments"
    DEPLOYED = "one deployment for the rest of the process"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WARM_UP: frozenset({State.WAIT, State.MEASURE, State.DEPLOYED}),
    State.WAIT: frozenset({State.MEASURE, State.DEPLOYED}),
    State.MEASURE: frozenset({State.DEPLOYED}),
    State.DEPLOYED: frozenset(),
}

WARM_UP_CALLS = 2
FAILED = Reason(ReasonCode.MEASURING_FAILED)
NO_MEMORY = Reason(ReasonCode.NO_MEMORY_TO_MEASURE)
OTHER_THREAD = "called from another thread while it was measured"
WAITING = "launched while another process measured its graph"
MAX_SIZES = 64
"""Dynamic sizes that are remembered until one comes back; measuring needs a size that does."""


@dataclass(slots=True)
class Tally:
    """How often a region was called; outlives the region, so that this can be said at exit."""

    calls: int = 0


@dataclass(frozen=True, slots=True)
class Decided:
    """What a region found out: its graph, the decision, and what is behind it (no measurements if it was not measured).

    `adopted`: another process's answer, if it is one.
    """

    graph: Graph
    decision: Decision
    measurements: tuple[Measurement, ...] = ()
    adopted: Entry | None = None


class Host(Protocol):
    """What a region needs of the process around it."""

    report: Report

    def turn(self, region: Region) -> Entry | Turn:
        """Return whose turn it is to measure a region, or the answer of another process that has."""

    def keep_turn(self, region: Region) -> None:
        """Note that this process is still measuring a region."""

    def helper_is_coming(self) -> bool:
        """Return whether the compiled helper is about to be there."""

    def agree(self, region: Region, result: Decided, offered: tuple[Deployment, ...]) -> Decision:
        """Return what is to run, of what is offered, in view of what other ranks have decided."""

    def decided(self, region: Region, result: Decided, runs: Decision) -> None:
        """Take note of a result, and of what was agreed to run; called once for a region, never raises."""


class Region:
    """A captured region that is not decided yet; call it with the list of inputs that Inductor hands over."""

    def __init__(
        self,
        graph: Graph,
        candidates: Candidates,
        host: Host,
        on_deployed: Callable[[Region, Deployment, Runnable], None],
        warm_up_calls: int = WARM_UP_CALLS,
        part: Part = ALONE,
    ) -> None:
        """Find out how `graph` is to run; `on_deployed` is told what runs it from then on."""
        self.graph = graph
        self.part = part
        self.state = State.WARM_UP
        self.tally = Tally()
        self._changing = threading.Lock()
        self._candidates: Candidates | None = candidates
        self._launch = candidates.runnable(Deployment.KERNELS)
        self._host = host
        # A CUDA error of the user's may surface in any call of ours, and must surface in theirs.
        self._guarded = guarded(host.report, "measuring")
        self._on_deployed = on_deployed
        self._warm_up_calls = max(warm_up_calls, WARM_UP_CALLS)
        self._call: Runnable = self._warm_up
        self._device = candidates.device_index
        self._trial: Trial | None = None
        self._sizes: tuple[int, ...] = ()
        self._seen_sizes: set[tuple[int, ...]] = set()
        self._in_measured_call = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        return self._call(inputs)

    def _deploy(self, result: Decided) -> None:
        """Run as decided from now on, and say so to everybody concerned."""
        # First what other threads call meanwhile, and what stays if this one is interrupted.
        self._call = self._launch
        self._enter(State.DEPLOYED)
        candidates = self._candidates
        assert candidates is not None
        agreed = self._guarded(lambda: self._host.agree(self, result, candidates.offered))
        decision = agreed or rules.not_measured(FAILED, self.tally.calls)
        self._call = run = candidates.runnable(decision.deployment)
        self._candidates = self._trial = None
        self._guarded(lambda: candidates.deploy(decision.deployment))
        self._guarded(lambda: self._on_deployed(self, decision.deployment, run))
        self._guarded(lambda: self._host.decided(self, result, decision))

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a region cannot go from {self.state.name} to {state.name}")
        self.state = state
        log.debug("%s: %s: %s", self.graph.name, state.name, state.value)

    # --- WARM_UP ---

    def _warm_up(self, inputs: list[Any]) -> Any:
        self.tally.calls += 1
        sizes = _sizes(inputs)
        if self.tally.calls > self._warm_up_calls and sizes in self._seen_sizes and not self._is_too_early():
            self._begin_measuring(sizes)
        elif len(self._seen_sizes) < MAX_SIZES:
            self._seen_sizes.add(sizes)
        return self._launch(inputs)

    def _is_too_early(self) -> bool:
        """Whether relocatable graphs could be measured only as they are without the compiled helper, which later processes have."""
        offers = self._can_run(Deployment.GRAPH)
        return offers and self._guarded(self._host.helper_is_coming) is True

    def _begin_measuring(self, sizes: tuple[int, ...]) -> None:
        if not self._changing.acquire(blocking=False):
            return  # another thread is at it; this call is launched
        with contextlib.ExitStack() as stack:
            stack.callback(self._changing.release)
            if self.state in {State.WARM_UP, State.WAIT}:
                self._leave_warm_up(sizes)

    def _leave_warm_up(self, sizes: tuple[int, ...]) -> None:
        turn = self._guarded(lambda: self._host.turn(self))
        if isinstance(turn, Entry) and self._can_run(turn.decision.deployment):
            self._deploy(Decided(self.graph, turn.decision, adopted=turn))
        elif turn is not Turn.OTHERS:
            self._start_measuring(sizes)
        elif self.state is State.WARM_UP:
            self._call = self._wait
            self._enter(State.WAIT)
            self._host.report.count(waited=1)

    def _can_run(self, deployment: Deployment) -> bool:
        return self._candidates is not None and self._candidates.offers(deployment)

    def _start_measuring(self, sizes: tuple[int, ...]) -> None:
        if reason := self._guarded(self._why_not_measure):
            self._deploy(Decided(self.graph, rules.not_measured(reason, self.tally.calls)))
            return
        self._sizes = sizes
        self._seen_sizes.clear()
        assert self._candidates is not None
        self._trial = Trial(self._candidates, self._guarded)
        self._call = self._measure  # before the state, by which other threads find out
        self._enter(State.MEASURE)

    def _why_not_measure(self) -> Reason | None:
        return None if headroom.is_enough_beside(self._device) else NO_MEMORY

    # --- WAIT ---

    def _wait(self, inputs: list[Any]) -> Any:
        sizes = _sizes(inputs)
        if sizes in self._seen_sizes:
            self._begin_measuring(sizes)
        elif len(self._seen_sizes) < MAX_SIZES:
            self._seen_sizes.add(sizes)
        if self.state is not State.WAIT:
            return self._call(inputs)
        self.tally.calls += 1
        self._host.report.count_fallback(WAITING)
        return self._launch(inputs)

    # --- MEASURE ---

    def _measure(self, inputs: list[Any]) -> Any:
        self.tally.calls += 1
        if reason := self._why_aside(inputs):
            self._host.report.count_fallback(reason)
            return self._launch(inputs)
        if not self._in_measured_call.acquire(blocking=False):
            self._host.report.count_fallback(OTHER_THREAD)
            return self._launch(inputs)
        try:
            return self._measured_call(inputs)
        finally:
            self._in_measured_call.release()

    def _measured_call(self, inputs: list[Any]) -> Any:
        trial = self._trial
        if trial is None:
            return self._call(inputs)  # another thread has decided meanwhile
        if self._has_refused() or self._guarded(trial.is_over):
            self._decide(trial)
            return self._call(inputs)
        self._guarded(lambda: self._host.keep_turn(self))
        return trial.call(inputs)

    def _why_aside(self, inputs: list[Any]) -> str | None:
        if _sizes(inputs) != self._sizes:
            return "called with other sizes while it was measured"
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return "called within a capture of the user's"
        return None

    def _has_refused(self) -> bool:
        """Whether no GRAPH is to be had any more, although one was offered: then there is nothing to be measured."""
        candidates = self._candidates
        return candidates is not None and candidates.possible != candidates.offered

    def _decide(self, trial: Trial) -> None:
        result = self._guarded(lambda: self._judge(trial))
        if result is None:
            result = Decided(self.graph, rules.not_measured(FAILED, self.tally.calls))
        self._deploy(result)

    def _judge(self, trial: Trial) -> Decided:
        measurements = self._possible(trial.measurements())
        decision = decide(measurements)
        if not (decision.final or rules.is_noisy(decision)):
            decision = self._without_choice() or rules.too_few_calls(self.tally.calls)
        self._host.report.measuring_ms += trial.price_ms(decision.deployment)
        return Decided(self.graph, decision, measurements)

    def _possible(self, measurements: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
        """Leave out what has come to refuse since it was measured."""
        candidates = self._candidates
        assert candidates is not None
        return tuple(each for each in measurements if not candidates.lacks(each.deployment))

    def _without_choice(self) -> Decision | None:
        """Return the decision if no GRAPH can be recorded, in any process or in this one."""
        relocate = self._candidates.relocate if self._candidates is not None else None
        if relocate is None or (reason := relocate.why_refused) is None:
            return None
        return policy.only_kernels(reason, final=relocate.refused_for_good)


def _sizes(inputs: list[Any]) -> tuple[int, ...]:
    return tuple(value for value in inputs if type(value) is int)
