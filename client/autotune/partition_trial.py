"""Takes one partition from its first call to its deployment, through warm-up, wait, trial and the agreement of ranks.

A `PartitionTrial` runs the calls of a partition until that is decided; then the decision is deployed in its place. The class is long
because each of its actions depends on its state.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from typing import TYPE_CHECKING, Any

from pygraphd.client.autotune.trial import Trial, sizes_of
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import IN_A_CAPTURE, PROFILED
from pygraphd.client.common import log
from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.common.guard import guarded
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.decision_service import DecisionService, Outcome
from pygraphd.client.decisions.leases import LeaseState, PendingGraph
from pygraphd.client.decisions.ranks.consensus import ALONE, RankRole
from pygraphd.schema import policy
from pygraphd.schema.messages import Decision, Deployment, Entry
from pygraphd.schema.policy import decide
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.client.autotune.candidates import Candidates
    from pygraphd.client.backend.torch_private import Runnable


class State(enum.Enum):
    """The state of a trial."""

    WARM_UP = "KERNELS, untimed: kernels or the helper are being compiled, ranks have not recorded it, or an earlier program was too short"
    WAIT = "KERNELS, while another process measures this graph"
    MEASURE = "real calls run in blocks: GRAPH, KERNELS, GRAPH"
    PROPOSE = "KERNELS, until the other ranks can be told the decision: the group's store fails"
    DEPLOYED = "one deployment for the rest of the process"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WARM_UP: frozenset({State.WAIT, State.MEASURE, State.PROPOSE, State.DEPLOYED}),
    State.WAIT: frozenset({State.MEASURE, State.PROPOSE, State.DEPLOYED}),
    State.MEASURE: frozenset({State.PROPOSE, State.DEPLOYED}),
    State.PROPOSE: frozenset({State.DEPLOYED}),
    State.DEPLOYED: frozenset(),
}

WARM_UP_CALLS = 2
FAILED = Reason(ReasonCode.MEASURING_FAILED)
UNTOLD = rules.not_measured(Reason(ReasonCode.RANKS_UNREACHABLE))
OTHER_THREAD = "called from another thread while it was measured"
OTHER_SIZES = "called with other sizes while it was measured"
WAITING = "ran as KERNELS while another process measured its graph"
PROPOSING = "ran as KERNELS until the other ranks could be told its decision"
PASSING = frozenset(
    {
        ReasonCode.GPU_WAITS,
        ReasonCode.RESULTS_NAN,
        ReasonCode.CANNOT_CAPTURE_NOW,
        ReasonCode.NO_MEMORY_TO_RECORD,
    }
)
"""Reasons against a recording that may pass while the program goes on: a message of another rank comes, a gradient scaler finds its scale,
the program stops recording the allocator's history, memory is freed after the first steps."""
MAX_WAITING_CALLS = 500
"""Calls that a trial waits for at most for such a reason to pass: recordings are tried at five of them, or once nothing prevents captures."""
MAX_SEEN_SIZES = 64
"""The number of sizes remembered until one of them comes back, the latest ones: a size is measured only if it comes back."""
MAX_OTHER_SIZES = 256
"""Calls in a row at other sizes than the measured one, after which the trial begins anew at a size that comes back; then twice as many each
time, since each beginning may cost a recording."""


class PartitionTrial:
    """Runs a partition that is not decided yet; call it with the list of inputs that Inductor hands over."""

    def __init__(
        self,
        pending: PendingGraph,
        candidates: Candidates,
        decisions: DecisionService,
        deploy: Callable[[Candidates, Deployment], object],
        warm_up_calls: int = WARM_UP_CALLS,
        role: RankRole = ALONE,
    ) -> None:
        """Decide the graph of `pending`; `deploy` then replaces this object by the callable of the decision."""
        self.pending = pending
        self.role = role
        self.state = State.WARM_UP
        self._candidates: Candidates | None = candidates
        self._run_kernels = candidates.run_kernels
        self._decisions = decisions
        self._deploy_here = deploy
        self._warm_up_calls = max(warm_up_calls, WARM_UP_CALLS)
        self._call: Runnable = self._warm_up
        self._trial: Trial | None = None
        self._replayed = -1
        """The number of replays when the trial began: if there were no more since, its calls as GRAPH ran as KERNELS."""
        self._waited = 0
        self._sizes: tuple[int, ...] = ()
        self._seen_sizes = BoundedLRU[tuple[int, ...], None](MAX_SEEN_SIZES)
        self._others = 0
        """The number of calls in a row at other sizes than the measured one."""
        self._most_others = MAX_OTHER_SIZES
        self._changing = threading.Lock()
        self._in_measured_call = threading.Lock()
        # A CUDA error of the user's work may surface in our calls, and must surface in the user's own.
        self._guarded = guarded(decisions.report, "measuring")
        decisions.open(pending, self)

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        return self._call(inputs)

    def interrupt(self) -> None:
        """Note that another size of the graph was called meanwhile: the interval of the latest sample spans that call, and is left out."""
        if (trial := self._trial) is not None:
            trial.interrupt()

    def _conclude(self, outcome: Outcome) -> None:
        """Propose a decision to the other ranks, and deploy what they run."""
        # First, since other threads call it meanwhile, and it stays if this thread is interrupted.
        self._call = self._run_kernels
        self._trial = None
        self._propose(outcome)

    def _propose(self, outcome: Outcome) -> None:
        digest = self.pending.graph.digest
        # Other ranks may have decided otherwise. In a tuple, to tell an error from None.
        answers = self._guarded(lambda: (self.role.propose(digest, outcome.decision),))
        (decision,) = answers or (rules.not_measured(FAILED, self.pending.calls),)
        if decision is not None:
            self._deploy(outcome, decision)
        elif self.state is not State.PROPOSE:
            self._enter(State.PROPOSE)
            self.pending.unfinished_as = UNTOLD, Source.UNFINISHED
            # At once: the store may be gone for good, as where rank 0 has ended.
            self._guarded(lambda: self._decisions.record(self.pending, outcome))
            self._call = functools.partial(self._propose_again, outcome)

    def _propose_again(self, outcome: Outcome, inputs: list[Any]) -> Any:
        """Run a call as KERNELS, and propose again; the store is asked at growing intervals."""
        if self._changing.acquire(blocking=False):
            try:
                if self.state is State.PROPOSE:
                    self._propose(outcome)
            finally:
                self._changing.release()
        self._decisions.report.count_fallback(PROPOSING)
        return self._run_kernels(inputs)

    def _deploy(self, outcome: Outcome, decision: Decision) -> None:
        """Deploy the decision of the ranks, and publish the outcome of this one."""
        self._enter(State.DEPLOYED)
        candidates = self._candidates
        assert candidates is not None
        self.pending.measurements = outcome.measurements
        self._call = candidates.runnable(decision.deployment)
        self._candidates = None
        try:
            self._guarded(lambda: self._deploy_here(candidates, decision.deployment))
        finally:
            # Releasing memory takes its time. An interrupt meanwhile is the program's, and must not lose what was measured.
            self._guarded(lambda: self._decisions.publish(self.pending, outcome, decision))

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            self._decisions.report.count_failure(
                f"measuring: a trial at {self.state.name} cannot go to {state.name}"
            )
            return
        self.state = state
        log.debug("%s: %s: %s", self.pending.graph.name, state.name, state.value)

    # --- WARM_UP ---

    def _warm_up(self, inputs: list[Any]) -> Any:
        self.pending.calls += 1
        sizes = sizes_of(inputs)
        is_due = self._comes_back(sizes) and self.pending.calls > self._warm_up_calls
        if is_due and not self._guarded(self._is_awaited):
            self._begin_measuring(sizes, inputs)
        return self._run_kernels(inputs)

    def _is_awaited(self) -> bool:
        candidates = self._candidates
        return candidates is not None and candidates.recordings.is_awaited

    def _comes_back(self, sizes: tuple[int, ...]) -> bool:
        """Remember the sizes of a call; return whether an earlier call had them. The latest `MAX_SEEN_SIZES` sizes are remembered."""
        is_seen = sizes in self._seen_sizes
        # Without a lock, which an interrupt could leave held. Where another thread changes it too, these sizes are remembered at their next call.
        with contextlib.suppress(RuntimeError):
            self._seen_sizes[sizes] = None
        return is_seen

    def _begin_measuring(self, sizes: tuple[int, ...], inputs: list[Any]) -> None:
        # Nothing would be measured, and a lease would run out unused. Or another thread is at it.
        if torch_private.is_profiled() or self._why_no_graph(inputs):
            return
        if not self._changing.acquire(blocking=False):
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._changing.release)
            if self.state in {State.WARM_UP, State.WAIT}:
                self._leave_warm_up(sizes)

    def _why_no_graph(self, inputs: list[Any]) -> str | None:
        """Return why a call would be no GRAPH for now, so that its time would say nothing of one."""
        candidates = self._candidates
        return (
            self._guarded(lambda: candidates.recordings.why_not(inputs)) if candidates is not None else None
        )

    def _leave_warm_up(self, sizes: tuple[int, ...]) -> None:
        lease = self._guarded(lambda: self._decisions.acquire(self.pending))
        if isinstance(lease, Entry):
            self._conclude(Outcome(lease.decision, adopted=lease))
        elif lease is LeaseState.OTHERS:
            if self.state is State.WARM_UP:
                self._call = self._wait
                self._enter(State.WAIT)
                self._decisions.report.count(waited=1)
        else:
            assert self._candidates is not None
            self._begin_trial(self._candidates, sizes)
            self._call = self._measure  # before the state, by which other threads find out
            self._enter(State.MEASURE)

    def _begin_trial(self, candidates: Candidates, sizes: tuple[int, ...]) -> None:
        # The trial first: no sample of an earlier one is taken for one of these sizes.
        self._trial = Trial(candidates, self._guarded)
        self._replayed = candidates.recordings.replayed
        self._sizes, self._others = sizes, 0
        self._seen_sizes = BoundedLRU(MAX_SEEN_SIZES)  # another thread may be changing the one before

    # --- WAIT ---

    def _wait(self, inputs: list[Any]) -> Any:
        sizes = sizes_of(inputs)
        if self._comes_back(sizes):
            self._begin_measuring(sizes, inputs)
        if self.state is not State.WAIT:
            return self._call(inputs)
        self.pending.calls += 1
        self._decisions.report.count_fallback(WAITING)
        return self._run_kernels(inputs)

    # --- MEASURE ---

    def _measure(self, inputs: list[Any]) -> Any:
        self.pending.calls += 1
        sizes = sizes_of(inputs)
        reason = self._why_not_measured(sizes, inputs)
        if reason is None and not self._in_measured_call.acquire(blocking=False):
            reason = OTHER_THREAD
        if reason is None:
            try:
                if sizes == self._sizes:
                    return self._measured_call(inputs)
            finally:
                self._in_measured_call.release()
            reason = OTHER_SIZES  # another thread has begun the trial anew meanwhile
        self.interrupt()
        self._decisions.report.count_fallback(reason)
        return self._run_kernels(inputs)

    def _why_not_measured(self, sizes: tuple[int, ...], inputs: list[Any]) -> str | None:
        """Return why a call is none of the trial's; None if it is, unless another thread is in one."""
        if sizes != self._sizes:
            self._note_other_sizes(sizes)
            return OTHER_SIZES
        self._others = 0
        if (trial := self._trial) is not None and trial.is_in_a_capture():
            return IN_A_CAPTURE
        return PROFILED if torch_private.is_profiled() else self._why_no_graph(inputs)

    def _note_other_sizes(self, sizes: tuple[int, ...]) -> None:
        """Count a call at other sizes than the measured one, which may never come back; begin anew at one that does if that is likely."""
        self._others += 1
        if self._others > self._most_others and self._comes_back(sizes):
            self._begin_anew(sizes)

    def _begin_anew(self, sizes: tuple[int, ...]) -> None:
        """Begin the trial anew at other sizes, under the same lease. What it has cost so far is reported."""
        if not self._in_measured_call.acquire(blocking=False):
            return  # its sizes have come back in another thread
        try:
            candidates, trial = self._candidates, self._trial
            # Another thread has decided or begun anew, or the sizes have come back.
            if candidates is None or trial is None or self._others <= self._most_others:
                return
            self._guarded(lambda: self._add_price(trial, Deployment.KERNELS))
            self._most_others *= 2
            self._begin_trial(candidates, sizes)
        finally:
            self._in_measured_call.release()
        log.debug("%s: measured anew, at sizes that come back", self.pending.graph.name)
        self._guarded(lambda: self._decisions.renew(self.pending))

    def _add_price(self, trial: Trial, deployment: Deployment) -> None:
        self._decisions.report.measuring_ms += trial.price_ms(deployment)

    def _measured_call(self, inputs: list[Any]) -> Any:
        candidates, trial = self._candidates, self._trial
        if trial is None or candidates is None:
            return self._call(inputs)  # another thread has decided meanwhile
        if self._waits_for_recording(candidates):
            # It may be recorded in this call, which so is no sample. No other process is kept from measuring for ever.
            self.interrupt()
            self._guarded(lambda: self._decisions.renew(self.pending))
            return candidates.recordings.run(inputs)
        # None: that is unknown, and a trial must end all the same.
        if candidates.recordings.why_refused is None and self._guarded(trial.is_over) is False:
            self._guarded(lambda: self._decisions.renew(self.pending))
            return trial.call(inputs)
        self._decide(trial)
        return self._call(inputs)

    def _waits_for_recording(self, candidates: Candidates) -> bool:
        """Count a call that finds no recording for a reason that passes; return whether the trial is to wait, too."""
        reason = candidates.recordings.why_refused
        self.pending.unfinished_as = None
        if reason is None or reason.code not in PASSING:
            return False
        # A program that ends meanwhile did not have too few calls.
        self.pending.unfinished_as = policy.only_kernels(reason, final=False), Source.UNFINISHED
        self._waited += 1
        return self._waited <= MAX_WAITING_CALLS

    def _decide(self, trial: Trial) -> None:
        outcome = self._guarded(lambda: self._judge(trial))
        self._conclude(outcome or Outcome(rules.not_measured(FAILED, self.pending.calls)))

    def _judge(self, trial: Trial) -> Outcome:
        candidates = self._candidates
        assert candidates is not None
        # A GRAPH may have come to refuse since it was measured. Or this size is refused, and another one has a recording.
        reason = candidates.recordings.why_refused
        is_graph = reason is None and candidates.recordings.replayed > self._replayed
        measurements = tuple(
            each for each in trial.measurements() if each.deployment is Deployment.KERNELS or is_graph
        )
        decision = decide(measurements)
        if not (decision.final or rules.is_noisy(decision)):
            decision = rules.too_few_calls(self.pending.calls)
            if reason is not None:
                decision = policy.only_kernels(reason, final=candidates.recordings.refused_for_good)
        self._add_price(trial, decision.deployment)
        return Outcome(decision, measurements, recording_us=candidates.recordings.recording_us)
