"""Which deployment the measuring regions of a step run in: all of them in one, and when they decide.

All regions of one step follow the order of one of them (`client.turns`), decide in the same step, and change deployments only between a backward and the next
forward. All is counted in rounds: a region that is called for each of 24 layers has 24 calls in one. Who takes part in them, and when one
is complete, `client.attendance` says. Knows nothing of torch.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from pygraphd.client.attendance import Attendance, leads
from pygraphd.client.open_forwards import OpenForwards
from pygraphd.schema.messages import Deployment, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.turns import Turns
    from pygraphd.schema.messages import Graph

MAX_OVERDUE = 100
"""Rounds that a change may wait for open forwards: more than a step has, if its layers share one graph."""
AGAIN = 20
"""Rounds in which samples that were taken must become known, or they are taken anew: a call that failed leaves none."""

ABSENT = 4
"""Rounds for which others go on in the deployment that one needs who does not come, before they go on with their own order. Two that are
called in turn, a few times each, would leave the other's deployment at each change, and get no sample."""


class Member(Protocol):
    """A region that is being measured."""

    turns: Turns

    @property
    def graph(self) -> Graph:
        """What it runs: its kind says which part of a step it is."""

    @property
    def family(self) -> int:
        """A number that a forward shares with its backward, and with nothing else."""

    def ready(self) -> bool:
        """Return whether it has the samples it needs."""


class Rota:
    """Which deployment the measuring regions of a process run in now, and when they decide.

    A round begins when a region comes round again and all others that took part in earlier ones have come. Its deployment holds for
    all that follow until the next round: who is in the midst of a block stays there, and then one of them
    goes on with its order. When all members of a round are ready, they decide in the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._attendance = Attendance()
        self._current = Deployment.KERNELS
        self._deciding = False
        self._guide: weakref.ref[Member] | None = None
        self._absent = 0
        """Rounds since the guide was there."""
        self._unknown = 0
        self._open_forwards = OpenForwards()
        self._overdue = 0
        self._families_for_later: dict[int, bool] = {}
        """Of a forward and its backward: the latter goes as the former has."""
        self.round = 0
        """The number of this round."""

    def is_for_later(self, member: Member) -> bool:
        """Note the call of a region that is measured, before it enters; return whether it is to be launched and not to enter.

        It is, if it is called seldom and others are measured that are not.
        """
        with self._lock:
            self._follow(member)
            later, family = self._attendance.is_for_later(member), member.family
            if leads(member):
                self._families_for_later[family] = later
            is_tied = member.graph.kind is not Kind.INFERENCE
            return self._families_for_later.get(family, later) if is_tied else later

    def enter(self, member: Member) -> Deployment | None:
        """Return the deployment for a region that is called now; None: it should decide."""
        with self._lock:
            if self._begins_round(member):
                self._begin_round(member)
            self._attendance.note(member)
            self._open_forwards.follow(member, self.round)
            if self._deciding and _is_ready(member):
                return None
            self._members[id(member)] = member
            return self._current

    def see(self, member: Member) -> None:
        """Note the call of a region that is not measured yet: if others are, it is part of their rounds."""
        with self._lock:
            if self._members:
                self._follow(member)
                self._attendance.note(member, warms_up=True)

    def expect(self, member: Member) -> None:
        """Note that a region is about to be measured: rounds wait for it from the first on."""
        with self._lock:
            self._follow(member)
            self._attendance.note(member)

    def leave(self, member: Member) -> None:
        """Note that a region is decided, and comes no more."""
        with self._lock:
            self._members.pop(id(member), None)  # who comes no more must not keep a round from ending
            self._attendance.excuse(member)
            self._families_for_later.pop(member.family, None)
            self._open_forwards.forget(member.family)
            if self._guide is not None and self._guide() is member:
                self._guide = None

    def _follow(self, member: Member) -> None:
        # Of what is put off, nobody knows which forwards are open.
        is_tied = self._open_forwards.is_tied(member.family) and not self._families_for_later.get(
            member.family
        )
        tells_steps = member.graph.kind is Kind.FORWARD and is_tied and self._open_forwards.are_none
        self._attendance.follow(member, tells_steps=tells_steps)

    def _begins_round(self, member: Member) -> bool:
        if not self._members:
            return True
        # Who began rounds in the middle of a step, having come first by chance, is followed by who begins steps.
        if self._overdue and member.graph.kind is not Kind.BACKWARD and self._open_forwards.are_none:
            return True
        if id(member) not in self._members:
            return False
        # A backward belongs to the step of its forward, unless none of the forwards is measured.
        kinds = {other.graph.kind for other in self._members.values()}
        if member.graph.kind is Kind.BACKWARD and kinds != {Kind.BACKWARD}:
            return False
        return self._attendance.is_complete()

    def _begin_round(self, leader: Member) -> None:
        between_steps = self._open_forwards.are_none
        if self._members:
            ready = all(map(_is_ready, self._members.values())) and self._attendance.is_warm()
            # Who has been called too often waits for nobody.
            self._deciding = leader.turns.exhausted or (ready and between_steps)
        wanted = self._wanted((leader, *self._members.values()))
        self._members.clear()
        self._attendance.begin()
        self.round += 1
        if wanted is self._current:
            self._overdue = 0
        elif between_steps or self._overdue >= MAX_OVERDUE:
            # A forward whose backward never comes must not hold everything up for ever.
            self._current, self._overdue = wanted, 0
            self._open_forwards.give_up()
        else:
            self._overdue += 1

    def _wanted(self, present: Sequence[Member]) -> Deployment:
        if any(each.turns.needs(self._current) for each in present):
            return self._current
        unfinished = [each for each in present if not each.turns.is_done]
        if not unfinished:
            return self._wait_for_samples(present)
        self._unknown = 0
        if self._is_guide_awaited(present):
            return self._current
        return self._whose_turn(unfinished).turns.next()

    def _is_guide_awaited(self, present: Sequence[Member]) -> bool:
        guide = self._guide() if self._guide is not None else None
        is_absent = guide is not None and not any(each is guide for each in present)
        self._absent = self._absent + 1 if is_absent else 0
        return guide is not None and guide.turns.needs(self._current) and 0 < self._absent <= ABSENT

    def _whose_turn(self, unfinished: Sequence[Member]) -> Member:
        """Return who goes on with what it has begun, or the first of those that are furthest behind, or have most to choose from."""
        guide = self._guide() if self._guide is not None else None
        most = max(each.turns.choices for each in unfinished)
        for each in unfinished:
            if each is guide and each.turns.choices == most and not each.turns.may_end:
                return each
        found = min(unfinished, key=lambda each: (each.turns.part, -each.turns.choices))
        self._guide = weakref.ref(found)
        return found

    def _wait_for_samples(self, present: Sequence[Member]) -> Deployment:
        """Launch, uncounted, until the GPU has got to all samples that were taken, or they must be taken anew."""
        self._unknown += 1
        if self._unknown > AGAIN:
            for each in present:
                if not each.ready():
                    each.turns.begin_again()
        return Deployment.KERNELS


def _is_ready(member: Member) -> bool:
    # In this order: what a member finds of half of its samples it might not find of all.
    return (member.turns.may_end or member.turns.exhausted) and member.ready()
