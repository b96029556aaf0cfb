"""Which regions take part in the rounds of measuring, and which of them have come in this one. Knows nothing of torch.

Where a forward is measured with its backward, steps can be told: one begins when such a forward comes again and none waits for its
backward. What is called in fewer than every second step is not waited for, and takes no part before those are decided that are called
in most. Else nobody can tell 24 layers that share a graph from 24 steps, and a round waits for so many calls.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.messages import Kind

if TYPE_CHECKING:
    from pygraphd.client.rota import Member

PATIENCE = 32
"""Calls for which a round waits for a region that was part of the one before. Doubled when one comes soon after it was given up,"""
MAX_PATIENCE = 128
"""up to here: the layers of a step often share one graph. What is called less often is better measured by itself."""
SOON = 4
"""Times the patience."""
IN_VAIN = 4
"""Times that rounds wait until a region is given up that does not come soon after; then they wait for one call, until something is decided."""
MOST_STEPS = 2
"""Steps after which a region comes again, or is called seldom."""
WARM_UP_ROUNDS = 4
"""Calls of a region that is not measured yet, for which the others wait with their decision."""


@dataclass(slots=True)
class _Visits:
    """In which step a region was called last and how often, and how many steps passed between that and earlier ones: the latest two."""

    step: int
    calls: int = 0
    gaps: tuple[int, ...] = ()

    def note(self, step: int) -> None:
        if step != self.step:
            self.gaps = (step - self.step, *self.gaps[:1])
            self.step, self.calls = step, 0
        self.calls += 1

    @property
    def are_seldom(self) -> bool:
        # Of what comes in bursts, one gap is short. And what is called again and again while there is no other step is all there is.
        return bool(self.gaps) and min(self.gaps) > MOST_STEPS and self.calls <= PATIENCE


class Attendance:
    """Which regions take part in rounds, and which of them have come in this one."""

    def __init__(self) -> None:
        self._missing: weakref.WeakSet[Member] = weakref.WeakSet()
        """Of those that are expected, who has not come yet in this round."""
        self._expected: weakref.WeakSet[Member] = weakref.WeakSet()
        self._given_up: weakref.WeakKeyDictionary[Member, int] = weakref.WeakKeyDictionary()
        self._warming_up: weakref.WeakKeyDictionary[Member, int] = weakref.WeakKeyDictionary()
        self._patience = PATIENCE
        self._waited = 0
        self._in_vain = 0
        self._calls = 0
        self._step = self._began_in = 0
        self._in_step: weakref.WeakSet[Member] = weakref.WeakSet()
        self._visits: weakref.WeakKeyDictionary[Member, _Visits] = weakref.WeakKeyDictionary()

    # --- steps ---

    def follow(self, member: Member, *, tells_steps: bool) -> None:
        """Note in which step a region comes, before anything else is asked; with one that `tells_steps` another begins if it comes again."""
        if tells_steps and member in self._in_step:
            self._step += 1
            self._in_step.clear()
        self._in_step.add(member)
        self._visits.setdefault(member, _Visits(self._step)).note(self._step)

    def is_for_later(self, member: Member) -> bool:
        """Whether a region is called so seldom that it would hold up others, which are measured now."""
        if member.graph.sizes:
            return False  # nobody waits for it
        return self._visits[member].are_seldom and any(map(self._is_frequent, self._expected))

    def _is_frequent(self, member: Member) -> bool:
        visits = self._visits.get(member)
        return visits is not None and not visits.are_seldom

    # --- rounds ---

    def note(self, member: Member, *, warms_up: bool = False) -> None:
        """Note that a region was called; from now on it is expected in each round."""
        self._calls += 1
        if member.graph.sizes:
            return  # it comes when its sizes do, which nobody can tell
        since_given_up = self._calls - self._given_up.pop(member, self._calls)
        if 0 < since_given_up < SOON * self._patience:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            self._in_vain = 0
        if warms_up:
            self._warming_up[member] = self._warming_up.get(member, 0) + 1
        else:
            self._warming_up.pop(member, None)
        self._missing.discard(member)
        self._expected.add(member)

    def excuse(self, member: Member) -> None:
        """Note that a region comes no more."""
        self._missing.discard(member)
        self._expected.discard(member)
        self._warming_up.pop(member, None)
        self._in_vain = 0

    def expected(self) -> list[Member]:
        """Return who takes part in each round."""
        return list(self._expected)

    def begin(self) -> None:
        """Begin a round, in which nobody has come yet."""
        self._missing = weakref.WeakSet(self._expected)
        self._waited = 0
        self._began_in = self._step

    def is_complete(self) -> bool:
        """Whether all have come, or were waited for in vain; to be asked once for each call."""
        if not self._missing:
            return True
        self._waited += 1
        is_seldom = self._step - self._began_in >= MOST_STEPS
        if self._waited <= (self._patience if self._in_vain < IN_VAIN else 1) and not is_seldom:
            return False
        self._in_vain += not is_seldom
        for each in self._missing:
            self._expected.discard(each)
            self._warming_up.pop(each, None)
            if not is_seldom:
                self._given_up[each] = self._calls
        return True

    def is_warm(self) -> bool:
        """Whether none of the regions is about to be measured, too."""
        return all(calls > WARM_UP_ROUNDS for calls in self._warming_up.values())


def leads(member: Member) -> bool:
    """Whether others of its family come when it does: the first part of a forward."""
    return member.graph.kind is Kind.FORWARD and member.graph.partition == 0
