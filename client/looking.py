"""A deployed graph that is looked at again: timed on a few calls, and a captured one beside launches of it.

What it cost when it was decided says whether it costs that still; what launches cost now says whether it is still worth while. As
where deployments are measured, all regions of a step take turns together (`client.rota`), and what runs is what was recorded long ago.
Where that cannot be, it is timed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client import room
from pygraphd.client.checking import Checked
from pygraphd.client.profiler import Profiler
from pygraphd.client.rota import Rota
from pygraphd.client.timeline import Timeline
from pygraphd.client.turns import MAX_CALLS, SAMPLES, Turns
from pygraphd.schema.messages import Deployment, Graph, Kind
from pygraphd.schema.policy import gain_in_trees_us, is_overtaken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pygraphd.client._torch import Runnable
    from pygraphd.client.candidates import Candidates
    from pygraphd.client.checking import Claimed, Jury
    from pygraphd.client.report import Report
    from pygraphd.schema.messages import Measurement

MAX_LAUNCHED = 48
"""Rounds in which calls are launched; nine do if what is found holds, and twice that if it has to be found once more,"""
MAX_IN_ROUND = 256
"""and calls of one round: it may wait for somebody who comes no more."""
MAX_UNFAIR = 4
"""Calls that cannot be timed, as of another thread: a step must not be run in two ways for long."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a graph is in its program: its `family` is a number that a forward shares with its backward."""

    graph: Graph
    family: int
    rota: Rota
    timeline: Timeline
    why_not_launch: Callable[[], str | None]
    """Says why there is no memory for launches of it; promises that memory if there is."""

    @property
    def order(self) -> tuple[bool, int]:
        """Where in a step it comes."""
        return self.graph.kind is Kind.BACKWARD, self.graph.partition


class Together:
    """The graphs of a family that are looked at: they begin in one step, once all have come, and go on alone if one has to."""

    def __init__(self) -> None:
        self.may_launch = True
        self.has_begun = False
        self._orders: dict[int, tuple[bool, int]] = {}
        self._missing: set[int] = set()

    def join(self, member: Looked) -> None:
        """Count in one that is yet to come."""
        self._orders[id(member)] = member.place.order
        self._missing.add(id(member))

    def leave(self, member: Looked) -> None:
        """Wait no more for one that will not come."""
        self._orders.pop(id(member), None)
        self._missing.discard(id(member))

    def come(self, member: Looked) -> bool:
        """Note a call; return whether the step is one that is to be measured."""
        if not self.has_begun and not self._missing:
            self.has_begun = self._orders[id(member)] == min(self._orders.values())
        if id(member) in self._missing:
            member.place.rota.expect(member)
            self._missing.discard(id(member))
        return self.has_begun


class Looked(Checked):
    """A captured graph that takes turns with launches of it until it is known whether it still is the faster way; see `Checked`."""

    def __init__(
        self,
        run: Runnable,
        claimed: Claimed,
        candidates: Candidates,
        settle: Callable[[Checked, bool], Runnable],
        report: Report,
        jury: Jury,
        place: Place,
    ) -> None:
        super().__init__(run, claimed, candidates, settle, report, jury)
        self.place, self.graph, self.family = place, place.graph, place.family
        self._launch = candidates.runnable(Deployment.KERNELS)
        self._both = (claimed.deployment, Deployment.KERNELS)
        self._is_alone = self._has_asked = False
        self._sampled = self._unfair = 0
        self._round = self._launched_rounds = self._in_round = 0
        self._reserved: room.Reserved | None = None
        """Before the first launch."""
        self._take_samples_anew()
        self._together = jury.together = jury.together or Together()
        self._together.join(self)

    # --- as a member of the rota ---

    def ready(self) -> bool:
        """Return whether there are enough samples, or will never be."""
        self._guarded(self._profiler.collect)
        return self.turns.exhausted or self._profiler.fewest(self._both) >= SAMPLES

    def gain_in_trees_us(self) -> float:
        """Return what a call saves in PyTorch's trees over a launch, as far as that is known."""
        return gain_in_trees_us(self._profiler.measurements())

    def loss_in_trees_us(self) -> float | None:
        """Return None: whoever is measured beside it must not rest on what is in doubt."""
        return None

    # --- as what is checked ---

    def withdraw(self) -> None:
        """Note that it could not be put where it would be called: nobody is to wait for it."""
        self._together.leave(self)
        super().withdraw()

    def _is_fair(self, inputs: list[Any]) -> bool:
        fair = super()._is_fair(inputs)
        self._unfair += not fair
        if self._unfair > MAX_UNFAIR:
            self._together.may_launch = False
        return fair

    def _fair_call(self, inputs: list[Any]) -> Any:
        if not self._has_asked:
            self._has_asked = True
            self._ask_for_memory()
        if not self._together.may_launch:
            return self._alone(inputs)
        rota = self.place.rota
        if not self.is_begun or not self._together.come(self) or rota.is_for_later(self):
            return self._call(inputs)
        deployment = rota.enter(self)
        if deployment is None and not self._is_found:
            self._is_to_judge = True
            self._guarded(self._judge)
        self._sampled += not self._is_found
        if deployment is None or deployment is self._claimed.deployment:
            return self._timed(self._claimed.deployment, self._call, inputs, rota.round)
        return self._launched(inputs)

    def _ask_for_memory(self) -> None:
        """Do so in the program's own thread: what asks the driver may disturb captures of others."""
        began = time.perf_counter()
        reason = self._guarded(lambda: self.place.why_not_launch() or "")
        if reason:
            self._report.step_aside(reason)
        if reason != "":
            self._together.may_launch = False
        self._report.checking_ms += (time.perf_counter() - began) * 1e3

    def _launched(self, inputs: list[Any]) -> Any:
        """Launch a call, also while others are measured in a third way."""
        if self._reserved is None:
            self._reserved = self._guarded(lambda: room.Reserved(self._device))
        self._count_launch(self.place.rota.round)
        try:
            return self._timed(Deployment.KERNELS, self._launch, inputs, self.place.rota.round)
        except BaseException:
            self._together.may_launch = False  # whatever it was must not be met again
            raise

    def _count_launch(self, round_: int) -> None:
        if round_ != self._round:
            self._round, self._in_round = round_, 0
            self._launched_rounds += 1
        self._in_round += 1
        if self._launched_rounds > MAX_LAUNCHED or self._in_round > MAX_IN_ROUND:
            self._together.may_launch = False

    def _alone(self, inputs: list[Any]) -> Any:
        if not self._is_alone:
            self._is_alone = True
            self.place.rota.leave(self)
            self._profiler = Profiler(self._device)
            self.turns = Turns((self._claimed.deployment,))
        if self._is_found:
            return self._call(inputs)
        return super()._fair_call(inputs)

    def _waits_in_vain(self) -> bool:
        if self._is_alone or not self._together.has_begun:
            return super()._waits_in_vain()
        return self._calls - self._sampled > MAX_CALLS or self.turns.exhausted

    def _take_samples_anew(self) -> None:
        if self._is_alone:
            super()._take_samples_anew()
            return
        self._profiler = Profiler(self._device, self.place.timeline)
        self.turns = Turns(self._both)
        self._is_to_judge = self._is_found = False

    def _has_enough(self) -> bool:
        if self._is_alone:
            return super()._has_enough()
        return self._is_to_judge and not self._is_found

    def _holds(self, seen: Mapping[Deployment, Measurement]) -> bool:
        if self._is_alone:
            return super()._holds(seen)
        mine, launch = (seen.get(each) for each in self._both)
        if mine is None or launch is None or min(mine.samples, launch.samples) < SAMPLES:
            return True  # it could not be found out
        if not self._claimed.cost.holds(mine):
            return False
        self.is_overtaken = is_overtaken(mine, launch, self._gain_of_backward_us())
        return not self.is_overtaken

    def _gain_of_backward_us(self) -> float:
        """Return what a forward in trees may lose there, as its backward gains more."""
        if self._claimed.deployment is not Deployment.TREES or self.graph.kind is not Kind.FORWARD:
            return 0.0
        together = self.place.rota.measured_with(self.family)
        return sum(each.gain_in_trees_us() for each in together if each.graph.kind is Kind.BACKWARD)

    def _found(self, *, holds: bool) -> None:
        self._is_found = True
        if self._is_alone:
            super()._found(holds=holds)
        else:
            # It goes on taking turns as long as its other half is in doubt: a step must not be run in two ways.
            self._jury.found(id(self), holds=holds)

    def _end(self, *, holds: bool) -> None:
        self.place.rota.leave(self)
        super()._end(holds=holds)
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._guarded(reserved.give_back)
