"""A decision that somebody else took, on another machine or as another user: used at once, and timed on a few calls.

If a call takes here what it is said to take, within a tolerance, the decision stays, and this object takes itself out of the way. If not,
whoever made it is told, and puts in its place what measures anew.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.autotune.trial import Trial
from pygraphd.client.common.guard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.autotune.candidates import Candidates
    from pygraphd.client.autotune.cost import Cost
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.schema.messages import Deployment

DISPUTED = "measured anew, since a call takes over 20 % more or less here than where that was decided"
MAX_CALLS = 1_024
"""Calls after which a decision stays that could not be timed."""


class Checked:
    """A compiled graph that runs as was decided elsewhere; call it with the list of inputs that Inductor hands over.

    `cost` is what a call with these `sizes` (integer inputs) is said to take. `settle` is told, once, whether that holds, and
    returns what runs from then on.
    """

    def __init__(
        self,
        deployment: Deployment,
        cost: Cost,
        sizes: tuple[int, ...],
        candidates: Candidates,
        settle: Callable[[Checked, bool], Runnable],
        report: Report,
    ) -> None:
        self._deployment = deployment
        self._cost = cost
        self._sizes = sizes
        self._candidates = candidates
        self._call = candidates.runnable(deployment)
        self._settle: Callable[[Checked, bool], Runnable] | None = settle
        self._report = report
        # A CUDA error of the user's may surface in any call of ours, and must surface in theirs.
        self._guarded = guarded(report, "checking")
        self._trial = self._new_trial()
        self._is_in_doubt = False
        self._calls = 0
        self._in_timed_call = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if self._settle is None or not self._in_timed_call.acquire(blocking=False):
            return self._call(inputs)
        try:
            return self._timed_call(inputs)
        finally:
            self._in_timed_call.release()

    def _timed_call(self, inputs: list[Any]) -> Any:
        self._calls += 1
        sizes = tuple([value for value in inputs if type(value) is int])
        if sizes != self._sizes or self._calls > MAX_CALLS:
            self._end(holds=True)  # nothing can be compared, or timed
        elif self._guarded(self._trial.is_measured):
            self._guarded(self._judge)
        if self._settle is None or self._is_captured():
            return self._call(inputs)
        return self._trial.call(inputs)

    def _new_trial(self) -> Trial:
        return Trial(self._candidates, self._guarded, only=self._deployment)

    def _is_captured(self) -> bool:
        with torch.cuda.device(self._candidates.device_index):
            return bool(torch.cuda.is_current_stream_capturing())

    def _judge(self) -> None:
        """Find out what the samples say; if that it does not hold, others have to say so, too."""
        self._report.checking_ms += self._trial.price_ms(self._deployment)
        holds = all(self._cost.holds(seen) for seen in self._trial.measurements())
        if holds or self._is_in_doubt:
            self._end(holds=holds)
        else:
            self._is_in_doubt, self._trial = True, self._new_trial()

    def _end(self, *, holds: bool) -> None:
        settle, self._settle = self._settle, None
        if settle is not None:
            self._call = self._guarded(lambda: settle(self, holds)) or self._call
