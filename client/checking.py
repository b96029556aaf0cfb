"""A decision that somebody else took, on another machine or as another user: used at once, and timed on a few calls.

If it costs here what it is said to cost, within a tolerance, it stays, and this object takes itself out of the way. If not,
whoever made it is told, and puts in its place what measures anew.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.profiler import Profiler
from pygraphd.client.turns import MAX_ROUNDS, SAMPLES, UNCOUNTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client._torch import Runnable
    from pygraphd.client.candidates import Candidates
    from pygraphd.client.costs import Cost
    from pygraphd.client.report import Report
    from pygraphd.schema.messages import Deployment

DISPUTED = "measured anew, since a call takes over 20 % more or less here than where that was decided"


class Checked:
    """A compiled graph that runs as was decided elsewhere; call it with the list of inputs that Inductor hands over.

    `cost` is what a call with these `sizes` (integer inputs) is said to cost. `settle` is told, once, whether that holds, and
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
        self._device = candidates.device_index
        self._profiler = Profiler(self._device)
        self._is_in_doubt = False
        self._thread: int | None = None
        self._calls = 0
        self._fair_calls = 0
        self._settling = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if self._settle is None:
            return self._call(inputs)
        self._calls += 1
        sizes = tuple([value for value in inputs if type(value) is int])
        if sizes != self._sizes or self._calls > MAX_ROUNDS:
            self._end(holds=True)  # nothing can be compared, or timed
            return self._call(inputs)
        return self._timed(inputs) if self._is_fair() else self._call(inputs)

    def _is_fair(self) -> bool:
        """Whether this call may be timed."""
        if self._thread is None:
            self._thread = threading.get_ident()
        if self._thread != threading.get_ident():
            return False
        with torch.cuda.device(self._device):
            return not torch.cuda.is_current_stream_capturing()

    def _timed(self, inputs: list[Any]) -> Any:
        began = time.perf_counter()
        self._fair_calls += 1
        call = None
        if self._fair_calls > UNCOUNTED[self._deployment]:
            call = self._guarded(lambda: self._profiler.start(self._deployment))
        prepared = self._candidates.prepared
        called = time.perf_counter()
        result = self._call(inputs)
        returned = time.perf_counter()
        if call is not None:
            steady = self._candidates.prepared == prepared
            self._guarded(lambda: self._profiler.stop(call, steady=steady))
            self._guarded(self._judge)
        self._report.checking_ms += (called - began + time.perf_counter() - returned) * 1e3
        return result

    def _judge(self) -> None:
        """Find out what the samples say when there are enough; if that it does not hold, others have to say so, too."""
        self._profiler.collect()
        if self._profiler.fewest([self._deployment]) < SAMPLES:
            return
        (seen,) = self._profiler.measurements()
        holds = self._cost.holds(seen)
        if holds or self._is_in_doubt:
            self._end(holds=holds)
        else:
            self._is_in_doubt = True
            self._profiler = Profiler(self._device)

    def _end(self, *, holds: bool) -> None:
        with self._settling:
            settle, self._settle = self._settle, None
        if settle is not None:
            self._call = self._guarded(lambda: settle(self, holds)) or self._call

    def _guarded(self, action: Callable[[], Any]) -> Any:
        # A CUDA error of the user's may surface in any driver call, and must surface in theirs.
        try:
            return action()
        except Exception as error:  # noqa: BLE001
            self._report.fail(f"checking: {type(error).__name__}")
            return None
