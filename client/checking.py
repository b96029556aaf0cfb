"""A decision that somebody else took, on another machine or as another user, or that was taken long ago: timed on a few calls.

If it costs here what it is said to cost, within a tolerance, it stays, and this object takes itself out of the way. If not,
whoever made it is told, and puts in its place what measures anew. A forward and its backward stay or go together.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.costs import Cost
from pygraphd.client.profiler import Profiler
from pygraphd.client.turns import MAX_ROUNDS, SAMPLES, Turns
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.client._torch import Runnable
    from pygraphd.client.candidates import Candidates
    from pygraphd.client.looking import Together
    from pygraphd.client.report import Report
    from pygraphd.schema.messages import Entry, Measurement

DISPUTED = "measured anew, since a call takes over 20 % more or less here than where that was decided"
DRIFTED = "measured anew, since a call has come to take over 20 % more or less than when that was decided"
OVERTAKEN = "measured anew, since launches have come to be faster"
RETRIED = "measured anew in its turn, beside what it was chosen over and what is gone"


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a decision from elsewhere says: a deployment, and what a call costs in it.

    `sizes` are the integers of the calls that this holds for.
    """

    deployment: Deployment
    cost: Cost
    sizes: tuple[int, ...] = ()

    def is_of(self, entry: Entry) -> bool:
        """Whether this is what an entry says, and not what somebody has found out since."""
        return self.cost.is_of(entry) and entry.decision.deployment is self.deployment


class Jury:
    """What is found of the decisions for a forward and its backward: they hold together, or are all measured anew."""

    def __init__(self) -> None:
        self._found: dict[int, bool | None] = {}
        self._to_come: set[int] = set()
        self._is_whole = True
        self._retries = self._has_begun = False
        self.together: Together | None = None
        """Of those that take turns with launches; see `looking`."""

    def join(self, member: int) -> None:
        """Count in one that is yet to be found out about."""
        self._found[member] = None
        self._to_come.add(member)

    def came(self, member: int) -> None:
        """Note that one of them was called."""
        self._to_come.discard(member)

    def withdrew(self, member: int) -> None:
        """Note that one of them will not be found out about now."""
        self._found[member] = True
        self.be_partial()

    def be_partial(self) -> None:
        """Note that not all are found out about together, so that they are not all measured anew either."""
        self._is_whole = self._retries = False

    def retry(self) -> None:
        """Have all be measured anew, whatever they cost, once each is where it is called and was; to be called when all have joined.

        A half alone would be decided without what the other gains.
        """
        self._retries = self._is_whole and self.verdict() is None

    @property
    def is_retrial(self) -> bool:
        """Whether they are."""
        return self._has_begun or (self._retries and not self._to_come)

    def found(self, member: int, *, holds: bool) -> None:
        """Note what was found of one of them."""
        self._found[member] = holds

    def verdict(self) -> bool | None:
        """Return whether all hold; None as long as that is open."""
        found = list(self._found.values())
        if self.is_retrial:
            self._has_begun = True  # for all, whatever becomes of one of them meanwhile
            return False
        if False in found:
            return False
        return None if None in found else True


class Checked:
    """A compiled graph that runs as was decided elsewhere or before; call it with the list of inputs that Inductor hands over.

    `settle` is told, once, whether the decision holds, and returns what runs from then on.
    """

    def __init__(
        self,
        run: Runnable,
        claimed: Claimed,
        candidates: Candidates,
        settle: Callable[[Checked, bool], Runnable],
        report: Report,
        jury: Jury,
    ) -> None:
        self._run = self._call = run
        self._claimed = claimed
        self._candidates = candidates.only(claimed.deployment)
        self._device = candidates.device_index
        self._settle: Callable[[Checked, bool], Runnable] | None = settle
        self._report = report
        self._profiler = Profiler(self._device)
        self._is_in_doubt = False
        self.turns = Turns((claimed.deployment,))
        self._thread: int | None = None
        self._calls = 0
        self._jury = jury
        self._is_judged = False
        self._settling = threading.Lock()
        self.is_begun = False
        """Whether it is in its place; what takes turns with launches does not before."""
        self.is_overtaken = False
        """Whether launches were found to be faster; see `looking`."""
        jury.join(id(self))

    @property
    def objection(self) -> str:
        """What stands against it, if it does not hold: one of the reasons above."""
        if self._jury.is_retrial:
            return RETRIED
        return OVERTAKEN if self.is_overtaken else DRIFTED

    def withdraw(self) -> None:
        """Note that it could not be put where it would be called: nobody is to wait for it."""
        self._jury.withdrew(id(self))

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if self._settle is not None:
            self._settle_if_possible()
        if self._is_judged or not self._is_fair(inputs):
            return self._call(inputs)
        return self._fair_call(inputs)

    def _settle_if_possible(self) -> None:
        self._calls += 1
        self._jury.came(id(self))
        verdict = self._jury.verdict()
        if verdict is None and self._waits_in_vain():
            self._jury.withdrew(id(self))
            verdict = True
        if verdict is not None:
            self._end(holds=verdict)

    def _waits_in_vain(self) -> bool:
        """Whether its calls cannot be timed, or the other half of its family is not called."""
        return self._calls > MAX_ROUNDS

    def _is_fair(self, inputs: list[Any]) -> bool:
        """Whether this call may be timed; with other dynamic sizes nothing can be compared, and what was decided stays."""
        if tuple([value for value in inputs if type(value) is int]) != self._claimed.sizes:
            self._found(holds=True)
            return False
        if self._thread is None:
            self._thread = threading.get_ident()
        if self._thread != threading.get_ident():
            return False
        with torch.cuda.device(self._device):
            return not torch.cuda.is_current_stream_capturing()

    def _fair_call(self, inputs: list[Any]) -> Any:
        return self._timed(self._claimed.deployment, self._call, inputs)

    def _timed(
        self, deployment: Deployment, run: Runnable, inputs: list[Any], round_: int | None = None
    ) -> Any:
        began = time.perf_counter()
        call = None
        if self.turns.take(deployment, round_):
            call = self._guarded(lambda: self._profiler.start(deployment))
        prepared = self._candidates.prepared
        called = time.perf_counter()
        result = run(inputs)
        returned = time.perf_counter()
        if call is not None:
            steady = self._candidates.prepared == prepared
            self._guarded(lambda: self._profiler.stop(call, steady=steady))
            self._guarded(self._judge)
        # What would not have run so but for this counts in full.
        ours = 0.0 if deployment is self._claimed.deployment else returned - called
        self._report.checking_ms += (called - began + ours + time.perf_counter() - returned) * 1e3
        return result

    def _judge(self) -> None:
        """Find out what the samples say when there are enough; if that it does not hold, others have to say so, too."""
        self._profiler.collect()
        if not self._has_enough():
            return
        holds = self._holds({each.deployment: each for each in self._profiler.measurements()})
        if holds or self._is_in_doubt:
            self._found(holds=holds)
        else:
            self._is_in_doubt = True
            self._take_samples_anew()

    def _take_samples_anew(self) -> None:
        self._profiler = Profiler(self._device)

    def _has_enough(self) -> bool:
        return self._profiler.fewest([self._claimed.deployment]) >= SAMPLES

    def _holds(self, seen: Mapping[Deployment, Measurement]) -> bool:
        return self._claimed.cost.holds(seen[self._claimed.deployment])

    def _found(self, *, holds: bool) -> None:
        self._is_judged = True
        self._jury.found(id(self), holds=holds)

    def _end(self, *, holds: bool) -> None:
        with self._settling:
            settle, self._settle = self._settle, None
        self._is_judged = True
        if settle is not None:
            self._call = self._guarded(lambda: settle(self, holds)) or self._run

    def _guarded(self, action: Callable[[], Any]) -> Any:
        # A CUDA error of the user's may surface in any driver call, and must surface in theirs.
        try:
            return action()
        except Exception as error:  # noqa: BLE001
            self._report.fail(f"checking: {type(error).__name__}")
            return None
