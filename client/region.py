"""One captured region of a compiled graph, from its first call to its deployment. Everything about a state is here.

A `Region` stands where Inductor would put PyTorch's own CUDA Graph. Once it is deployed it takes itself out of the way, so
that a call costs what it would cost without us. It is long because all that a region may do, and what it goes back to if it was
measured anew, is a matter of its state.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client import costs, policy, room
from pygraphd.client.agreement import ALONE, Part
from pygraphd.client.candidates import Candidates, Deployed
from pygraphd.client.claims import Turn
from pygraphd.client.costs import Cost
from pygraphd.client.profiler import Profiler
from pygraphd.client.turns import SAMPLES, Turns
from pygraphd.schema.messages import Conditions, Decision, Deployment, Entry, Graph, Kind, Measurement
from pygraphd.schema.policy import (
    decide,
    gain_in_trees_us,
    is_unbeaten,
    loss_in_trees_us,
    seeming_gain_in_trees_us,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.client._torch import Runnable
    from pygraphd.client.report import Report
    from pygraphd.client.rota import Rota
    from pygraphd.client.timeline import Timeline


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
OTHER_THREAD = "called from another thread while it was measured"
WAITING = "launched while another process measured its graph"
OTHERS_CALLS = 4
"""Calls of other threads without one of the thread that measures, after which another one goes on: a server may have one for each request."""
SELDOM = "measured later, since it is called more seldom than what is being measured"
CPU_INPUT = "a captured part takes a tensor on the CPU: PyTorch's trees, which fail on it or never read it again, are not tried"
MAX_SIZES = 64
"""Dynamic sizes that are remembered until one comes back; measuring needs a size that does."""


@dataclass(slots=True)
class Tally:
    """How often a region was called; outlives the region, so that this can be said at exit."""

    calls: int = 0


@dataclass(frozen=True, slots=True)
class Decided:
    """What a region found out: its graph, the decision, and what is behind it (no measurements if it was not measured).

    `adopted`: another process's answer, if it is one. `provisional`: measurements speak for it, but something could not be had meanwhile.
    `kept`: it goes on as before, whatever the measurements speak for.
    """

    graph: Graph
    decision: Decision
    measurements: tuple[Measurement, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    adopted: Entry | None = None
    provisional: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Before:
    """How a region ran until it was to be measured anew, and what a call cost; it goes on so if nothing can be found out.

    `may_stay`: also if nothing is found to be faster beyond the noise, as it was not in doubt. `is_partial`: not all that there is
    is tried, so that what is confirmed is nothing to be told.
    """

    deployment: Deployment
    cost: Cost | None
    may_stay: bool = False
    is_partial: bool = False

    def why_stay(self, result: Decided) -> str | None:
        """Return why it goes on so, in view of what was found; None if it does not."""
        if not (result.decision.final or (result.provisional and not self.may_stay)):
            return policy.AS_BEFORE
        if not self.may_stay:
            return None
        is_same = self.is_partial and result.decision.deployment is self.deployment
        unbeaten = is_same or is_unbeaten(self.deployment, result.measurements, result.conditions)
        return policy.UNBEATEN if unbeaten else None


class Host(Protocol):
    """What a region needs of the process around it."""

    rota: Rota
    timeline: Timeline
    report: Report

    def turn(self, region: Region) -> Entry | Turn:
        """Return whose turn it is to measure a region, or the answer of another process that has."""

    def keep_turn(self, region: Region) -> None:
        """Note that this process is still measuring a region."""

    def helper_is_coming(self) -> bool:
        """Return whether the compiled helper is about to be there."""

    def decided_as_refused(self, region: Region, refusal: str) -> Entry | None:
        """Return what was found where relocatable graphs were refused for the same reason, if that may be taken as it is."""

    def conditions(self, region: Region) -> Conditions:
        """Return what was decided for others, as far as the decision for a measured region depends on it."""

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
        on_deployed: Callable[[Region, Deployed], None],
        family: int,
        warm_up_calls: int = WARM_UP_CALLS,
        part: Part = ALONE,
        before: Before | None = None,
    ) -> None:
        """Find out how `graph` is to run; `before` is how it ran until now, if it did."""
        self.graph = graph
        self.family = family
        self.part = part
        self._before = before
        self._reserved: room.Reserved | None = None
        """Before it was measured anew."""
        self.state = State.WARM_UP
        self.tally = Tally()
        self._changing = threading.Lock()
        self._candidates: Candidates | None = candidates
        self._launch = candidates.runnable(Deployment.KERNELS)
        self._host = host
        self._on_deployed = on_deployed
        self._warm_up_calls = max(warm_up_calls, WARM_UP_CALLS)
        self._call: Runnable = self._warm_up
        self.turns = Turns(candidates.offered)
        self._device = candidates.device_index
        self._profiler = Profiler(self._device, host.timeline)
        self._needs_trees = False
        self._has_come_to_refuse = False
        self._sizes: tuple[int, ...] = ()
        self._seen_sizes: set[tuple[int, ...]] = set()
        self._thread = 0
        self._others_calls = 0
        self._in_measured_call = threading.Lock()
        self._timed_calls = 0
        self._timed_ms = 0.0

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        return self._call(inputs)

    @property
    def ran_before(self) -> bool:
        """Whether it is measured anew,"""
        return self._before is not None

    @property
    def may_stay(self) -> bool:
        """and although nothing was found against how it ran."""
        return self._before is not None and self._before.may_stay

    def ready(self) -> bool:
        """Return whether every candidate has its samples, or will never have them, or needs none."""
        self._guarded(self._profiler.collect)
        candidates = self._candidates
        if candidates is None or self.turns.exhausted:
            return True
        tried = candidates.possible
        return self._profiler.fewest(tried) >= SAMPLES or self._can_spare_trees(tried)

    def gain_in_trees_us(self) -> float:
        """Return what a call saves in PyTorch's trees over the best of all else, as far as that is known."""
        before = self._before
        # What runs there is given the benefit of the doubt, and so is its forward.
        runs_there = before is not None and before.may_stay and before.deployment is Deployment.TREES
        return (seeming_gain_in_trees_us if runs_there else gain_in_trees_us)(self._profiler.measurements())

    def loss_in_trees_us(self) -> float | None:
        """Return what a call takes longer in trees than in the fastest way; None if that is not known, or they are no choice."""
        return loss_in_trees_us(self._profiler.measurements())

    def _can_spare_trees(self, tried: tuple[Deployment, ...]) -> bool:
        rest = [each for each in tried if each is not Deployment.TREES]
        if not self._needs_trees and self._profiler.fewest(rest) >= SAMPLES:
            # As long as others are measured, more becomes known; but what has been tried was tried.
            spares = self._guarded(lambda: policy.spares_trees(self._profiler.measurements()))
            self._needs_trees = spares is not True
            return not self._needs_trees and Deployment.GRAPH in tried
        return False

    def _deploy(self, result: Decided) -> None:
        """Run as decided from now on, and give back what finding out has taken."""
        self._put_in_place(result)
        # Not before what was not chosen can be called by nobody any more.
        if self._reserved is not None:
            self._guarded(self._reserved.give_back)

    def _put_in_place(self, result: Decided) -> None:
        """Run as decided from now on, and say so to everybody concerned."""
        result = self._guarded(lambda: self._as_before(result)) or result
        # First what other threads call meanwhile, and what stays if this one is interrupted.
        self._call = self._launch
        self._enter(State.DEPLOYED)
        self._host.rota.leave(self)
        candidates = self._candidates
        assert candidates is not None
        agreed = self._guarded(lambda: self._host.agree(self, result, candidates.offered))
        decision = agreed or policy.not_measured(policy.FAILED, self.tally.calls)
        self._call = candidates.runnable(decision.deployment)
        # The trees free a recording's memory when nobody can call it any more.
        self._candidates = None
        self._guarded(lambda: candidates.let_go_of_all_but(decision.deployment))
        kept = candidates.only(decision.deployment)
        deployed = Deployed(self._call, decision.deployment, kept, *self._borne_out(result, decision))
        self._guarded(lambda: self._on_deployed(self, deployed))
        self._guarded(lambda: self._host.decided(self, result, decision))

    def _as_before(self, result: Decided) -> Decided | None:
        """Return that a region goes on as before if it is to, in view of what was found; None if it is not."""
        before = self._before
        if before is None or result.adopted is not None:
            return None
        conditions = self._host.conditions(self)
        if before.deployment is Deployment.TREES and conditions.forward_in_trees is False:
            return None  # what it would take from its forward does not lie where trees look for it
        reason = before.why_stay(result)
        if before.may_stay and self._is_in_trees_without_its_backward(before, conditions):
            reason = policy.AS_BEFORE
        if reason is None:
            return None
        decision = policy.as_before(before.deployment, reason, self.tally.calls)
        measurements = result.measurements if reason == policy.UNBEATEN else ()
        return Decided(self.graph, decision, measurements, kept=True)

    def _is_in_trees_without_its_backward(self, before: Before, conditions: Conditions) -> bool:
        """Whether it may run as it does for what its backward gains, which is not measured with it."""
        is_forward = self.graph.kind is Kind.FORWARD
        return is_forward and before.deployment is Deployment.TREES and conditions.backward_gain_us is None

    def _borne_out(self, result: Decided, runs: Decision) -> tuple[Cost | None, Entry | None]:
        """Return what a call costs as it `runs`, if that is known, and who has said so, if it was another process."""
        before, entry = self._before, result.adopted
        if entry is not None and runs.deployment is entry.decision.deployment:
            return costs.of_entry(entry), entry
        cost = None if result.kept else costs.of_measurements(result.measurements, runs.deployment)
        if cost is None and before is not None and runs.deployment is before.deployment:
            cost = before.cost
        return cost, None

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a region cannot go from {self.state.name} to {state.name}")
        self.state = state

    # --- WARM_UP ---

    def _warm_up(self, inputs: list[Any]) -> Any:
        self.tally.calls += 1
        sizes = _sizes(inputs)
        if self.tally.calls > self._warm_up_calls and sizes in self._seen_sizes and not self._is_too_early():
            self._begin_measuring(sizes, inputs)
        elif len(self._seen_sizes) < MAX_SIZES:
            self._seen_sizes.add(sizes)
        self._be_seen()
        return self._launch(inputs)

    def _is_too_early(self) -> bool:
        """Whether relocatable graphs could be measured only as they are without the compiled helper, which later processes have."""
        offers = self._can_run(Deployment.GRAPH)
        return offers and self._guarded(self._host.helper_is_coming) is True

    def _be_seen(self) -> None:
        if self.state in {State.WARM_UP, State.WAIT}:
            self._host.rota.see(self)

    def _begin_measuring(self, sizes: tuple[int, ...], inputs: list[Any]) -> None:
        if not self._changing.acquire(blocking=False):
            return  # another thread is at it; this call is launched
        with contextlib.ExitStack() as stack:
            stack.callback(self._changing.release)
            if self.state in {State.WARM_UP, State.WAIT}:
                self._leave_warm_up(sizes, inputs)

    def _leave_warm_up(self, sizes: tuple[int, ...], inputs: list[Any]) -> None:
        turn = self._guarded(lambda: self._host.turn(self))
        if isinstance(turn, Entry) and self._can_run(turn.decision.deployment):
            self._deploy(Decided(self.graph, turn.decision, adopted=turn))
        elif turn is not Turn.OTHERS:
            self._start_measuring(sizes, inputs)
        elif self.state is State.WARM_UP:
            self._call = self._wait
            self._enter(State.WAIT)
            self._host.report.count(waited=1)

    def _can_run(self, deployment: Deployment) -> bool:
        return self._candidates is not None and self._candidates.offers(deployment)

    def _start_measuring(self, sizes: tuple[int, ...], inputs: list[Any]) -> None:
        if reason := self._guarded(self._why_not_measure):
            self._deploy(Decided(self.graph, policy.not_measured(reason, self.tally.calls)))
            return
        if has_cpu_tensor(inputs):
            self._leave_out_trees()
        if self._before is not None:
            self._reserved = self._guarded(lambda: room.Reserved(self._device))
        self._sizes = sizes
        self._seen_sizes.clear()
        self._thread = threading.get_ident()
        self._call = self._measure  # before the state, by which other threads find out
        self._enter(State.MEASURE)

    def _leave_out_trees(self) -> None:
        candidates = self._candidates
        assert candidates is not None
        if candidates.trees is not None:
            self._candidates = candidates.without_trees()
            self.turns = Turns(self._candidates.offered)
            self._host.report.leave_on_cpu(CPU_INPUT)

    def _why_not_measure(self) -> str | None:
        return room.why_not_beside(self._device)

    # --- WAIT ---

    def _wait(self, inputs: list[Any]) -> Any:
        sizes = _sizes(inputs)
        if sizes in self._seen_sizes:
            self._begin_measuring(sizes, inputs)
        elif len(self._seen_sizes) < MAX_SIZES:
            self._seen_sizes.add(sizes)
        if self.state is not State.WAIT:
            return self._call(inputs)
        self.tally.calls += 1
        self._be_seen()
        self._host.report.step_aside(WAITING)
        return self._launch(inputs)

    # --- MEASURE ---

    def _measure(self, inputs: list[Any]) -> Any:
        self.tally.calls += 1
        if reason := self._why_aside(inputs):
            self._host.report.step_aside(reason)
            return self._launch(inputs)
        if not self._in_measured_call.acquire(blocking=False):
            self._host.report.step_aside(OTHER_THREAD)
            return self._launch(inputs)
        try:
            return self._measured_call(inputs)
        finally:
            self._in_measured_call.release()

    def _measured_call(self, inputs: list[Any]) -> Any:
        if self._has_come_to_refuse and (told := self._guarded(self._as_where_refused)) is not None:
            self._deploy(told)
            return self._call(inputs)
        if self._host.rota.is_for_later(self):
            self._host.report.step_aside(SELDOM)
            return self._launch(inputs)
        self._guarded(lambda: self._host.keep_turn(self))
        deployment = self._host.rota.enter(self)
        if deployment is None:
            self._decide()
            return self._call(inputs)
        return self._timed_call(deployment, inputs)

    def _why_aside(self, inputs: list[Any]) -> str | None:
        if self._is_for_another_thread():
            return OTHER_THREAD
        if _sizes(inputs) != self._sizes:
            return "called with other sizes while it was measured"
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return "called within a capture of the user's"
        return None

    def _is_for_another_thread(self) -> bool:
        mine = threading.get_ident()
        if mine == self._thread:
            self._others_calls = 0
            return False
        self._others_calls += 1
        candidates = self._candidates
        # PyTorch's trees are a thread's own.
        if self._others_calls <= OTHERS_CALLS or candidates is None or candidates.trees is not None:
            return True
        self._thread, self._others_calls = mine, 0
        return False

    def _timed_call(self, deployment: Deployment, inputs: list[Any]) -> Any:
        candidates = self._candidates
        assert candidates is not None
        if candidates.lacks(deployment):
            deployment = Deployment.KERNELS
        if candidates.possible != self.turns.candidates:
            # Something has come to refuse: the others are measured in an order of their own.
            self.turns.choose_from(candidates.possible)
            self._profiler.begin_again()
            self._has_come_to_refuse = True
        run = candidates.runnable(deployment)
        began = time.perf_counter()
        fair = self.turns.take(deployment, self._host.rota.round)
        prepared = candidates.prepared
        call = self._guarded(lambda: self._profiler.start(deployment, fair=fair, part=self.turns.part))
        result = run(inputs)
        if call is not None:
            steady = candidates.prepared == prepared
            self._guarded(lambda: self._profiler.stop(call, steady=steady))
        self._timed_calls += 1
        self._timed_ms += (time.perf_counter() - began) * 1e3
        return result

    def _guarded(self, action: Callable[[], Any]) -> Any:
        # A CUDA error of the user's may surface in any driver call, and must surface in theirs.
        try:
            return action()
        except Exception as error:  # noqa: BLE001
            self._host.report.fail(f"measuring: {type(error).__name__}")
            return None

    def _decide(self) -> None:
        result = self._guarded(self._judge)
        if result is None:
            result = Decided(self.graph, policy.not_measured(policy.FAILED, self.tally.calls))
        self._deploy(result)

    def _judge(self) -> Decided:
        measurements = self._possible(self._profiler.measurements())
        conditions = self._host.conditions(self)
        decision = decide(measurements, conditions)
        refusal = self._why_provisional() if decision.final else None
        if not decision.final:
            decision = self._without_choice() or policy.too_few_calls(self.tally.calls)
        elif refusal is not None:
            decision = policy.without_relocation(decision, refusal)
        self._host.report.measuring_ms += self._price_ms(measurements, decision.deployment)
        return Decided(self.graph, decision, measurements, conditions, provisional=refusal is not None)

    def _possible(self, measurements: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
        """Leave out what has come to refuse since it was measured."""
        candidates = self._candidates
        assert candidates is not None
        return tuple(each for each in measurements if not candidates.lacks(each.deployment))

    def _why_provisional(self) -> str | None:
        return self._candidates.why_provisional() if self._candidates is not None else None

    def _as_where_refused(self) -> Decided | None:
        """Return what was decided before where relocatable graphs could not be had, for the same reason as now; asked once."""
        self._has_come_to_refuse = False
        refusal = self._why_provisional()
        entry = self._host.decided_as_refused(self, refusal) if refusal is not None else None
        if entry is None or not self._can_run(entry.decision.deployment):
            return None
        return Decided(self.graph, entry.decision, adopted=entry)

    def _without_choice(self) -> Decision | None:
        """Return the decision if everything but KERNELS has refused, for good or for now."""
        candidates = self._candidates
        if candidates is None:
            return None
        if (refusal := candidates.why_only_launch()) is not None:
            return policy.only_launch_as_refused(refusal)
        refusal = candidates.why_only_launch_for_now()
        return policy.only_launch_for_now(refusal) if refusal is not None else None

    def _price_ms(self, measurements: tuple[Measurement, ...], deployment: Deployment) -> float:
        """Return the host time of the timed calls beyond what they would have taken with the decision known."""
        # It may go on as before.
        runs = {deployment, self._before.deployment if self._before is not None else deployment}
        known = min((m.host_us for m in measurements if m.deployment in runs), default=0.0)
        return max(0.0, self._timed_ms - self._timed_calls * known / 1e3)


def has_cpu_tensor(inputs: list[Any]) -> bool:
    """Whether any of a call's inputs is a tensor on the CPU."""
    return any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs)


def _sizes(inputs: list[Any]) -> tuple[int, ...]:
    return tuple(value for value in inputs if type(value) is int)
