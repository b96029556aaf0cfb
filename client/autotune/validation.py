"""Validates a decision of another user or host: it is used at once, and timed on a few calls.

If the times agree with the cost in the entry, within a tolerance, the decision is kept. If not, the partition is measured anew.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pygraphd.client.autotune.trial import Trial, sizes_of
from pygraphd.client.backend import torch_private
from pygraphd.client.common.guard import guarded
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.autotune.candidates import Candidates
    from pygraphd.client.autotune.cost import Cost
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.decisions.decision_service import DecisionService
    from pygraphd.client.decisions.leases import PendingGraph

MAX_CALLS = 1_024
"""The number of calls after which a decision that could not be timed is kept."""


class Validation:
    """Runs a partition by a foreign decision, and times it; call it with Inductor's list of inputs.

    `cost` is the cost that the entry states for calls with the integer inputs `sizes`. `finish(holds)` is called once, with the outcome,
    and returns the callable that runs from then on.
    """

    def __init__(
        self,
        pending: PendingGraph,
        deployment: Deployment,
        cost: Cost,
        sizes: tuple[int, ...],
        candidates: Candidates,
        finish: Callable[[Candidates, bool], Runnable],
        decisions: DecisionService,
    ) -> None:
        self._pending = pending
        self._deployment = deployment
        self._cost = cost
        self._sizes = sizes
        self._candidates = candidates
        self._call = candidates.runnable(deployment)
        self._finish: Callable[[Candidates, bool], Runnable] | None = finish
        self._decisions = decisions
        # A CUDA error of the user's work may surface in our calls, and must surface in the user's own.
        self._guarded = guarded(decisions.report, "checking")
        self._trial = Trial(candidates, self._guarded, only=deployment)
        self._has_differed = False
        self._calls = 0
        self._in_timed_call = threading.Lock()
        decisions.open(pending, self, lease=False)

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if self._finish is None or not self._in_timed_call.acquire(blocking=False):
            return self._call(inputs)
        try:
            return self._timed_call(inputs)
        finally:
            self._in_timed_call.release()

    def _timed_call(self, inputs: list[Any]) -> Any:
        if self._deployment is Deployment.GRAPH and self._guarded(lambda: self._is_no_graph(inputs)):
            return self._call(inputs)  # as KERNELS, whose times say nothing of a GRAPH
        if torch_private.is_profiled():
            return self._call(inputs)  # its time says nothing of calls without a profiler
        self._calls += 1
        if sizes_of(inputs) != self._sizes or self._calls > MAX_CALLS:
            self._end(holds=True)  # nothing can be compared, or timed
        elif self._guarded(self._trial.is_measured):
            self._guarded(self._judge)
        if self._finish is None or self._trial.is_in_a_capture():
            return self._call(inputs)
        return self._trial.call(inputs)

    def _is_no_graph(self, inputs: list[Any]) -> bool:
        recordings = self._candidates.recordings
        return recordings.is_awaited or recordings.why_not(inputs) is not None

    def _judge(self) -> None:
        """Compare the samples with the cost; a difference counts only if a second trial confirms it."""
        self._decisions.report.checking_ms += self._trial.price_ms(self._deployment)
        holds = all(self._cost.holds(seen) for seen in self._trial.measurements())
        if holds or self._has_differed:
            self._end(holds=holds)
        else:
            self._has_differed = True
            self._trial = Trial(self._candidates, self._guarded, only=self._deployment)

    def _end(self, *, holds: bool) -> None:
        finish, self._finish = self._finish, None
        if finish is None:
            return
        self._guarded(lambda: self._decisions.validated(self._pending, holds=holds))
        self._call = self._guarded(lambda: finish(self._candidates, holds)) or self._call
