"""Whose turn it is: the balanced order in which measuring regions try the deployments on real calls.

Two levels. `Turns` is one region's own order: blocks of A B B A, and trees last where there are relocatable graphs, too, as they may
not be needed. `Rota` makes all regions of one step follow one of them, decide in the same step, and change deployments only between a backward and the next
forward: PyTorch's CUDA Graph trees depend on what ran before, and record anew for every mixture of captured and launched
graphs. Both count in rounds: a region that is called for each of 24 layers has 24 calls in one. Knows nothing of torch.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment, Kind

if TYPE_CHECKING:
    from pygraphd.schema.messages import Graph

BLOCK = 5
"""Rounds before the order moves on; the first after a change is never counted."""
SAMPLES = policy.MIN_SAMPLES
"""Samples of each deployment that end measuring."""
MAX_ROUNDS = 400
"""Rounds after which measuring ends with what there is; two dozen are usual,"""
MAX_CALLS = 8_192
"""or calls; of a graph that 80 layers call, a few thousand are."""
MAX_OVERDUE = 100
"""Rounds that a change may wait for open forwards: more than a step has, if its layers share one graph."""
UNCOUNTED = {Deployment.LAUNCH: 1, Deployment.TREES: 3, Deployment.RELOCATE: 4}
"""A deployment's first rounds in a process, which pay for setting it up. Trees warm up, record, then replay; relocatable graphs
see that sizes come back, record, replay, and in training begin to keep memory."""
PATIENCE = 32
"""Calls for which a round waits for a region that was part of the one before. Doubled when one comes soon after it was given up,"""
MAX_PATIENCE = 128
"""up to here: the layers of a step often share one graph. What is called less often is better measured by itself."""
SOON = 4
"""Times the patience."""
WARM_UP_ROUNDS = 4
"""Calls of a region that is not measured yet, for which the others wait with their decision."""


class Turns:
    """One region's progress through the deployments it may run in, `candidates`."""

    def __init__(self, candidates: tuple[Deployment, ...]) -> None:
        self.choices = len(candidates)
        self._order = _order(candidates)
        self._rounds: Counter[Deployment] = Counter()
        self._calls = 0
        self._latest: tuple[int | None, Deployment] | None = None
        self._fair = False

    @property
    def exhausted(self) -> bool:
        """Whether so many have not been enough."""
        return self._rounds.total() >= MAX_ROUNDS or self._calls >= MAX_CALLS

    def next(self) -> Deployment:
        """Return the deployment that this region would run in if it could choose."""
        return self._order[self._rounds.total() // BLOCK % len(self._order)]

    def take(self, deployment: Deployment, round_: int | None = None) -> bool:
        """Note that the region now runs in `deployment`; return whether this call is a fair sample of it.

        All calls of a round are, or none; without its number, each is a round of its own.
        """
        self._calls += 1
        if round_ is None or self._latest != (round_, deployment):
            follows = self._latest is not None and self._latest[1] is deployment
            self._fair = follows and self._rounds[deployment] >= UNCOUNTED[deployment]
            self._rounds[deployment] += 1
            self._latest = (round_, deployment)
        return self._fair


def _order(candidates: tuple[Deployment, ...]) -> tuple[Deployment, ...]:
    if Deployment.RELOCATE not in candidates or Deployment.TREES not in candidates:
        return (*candidates, *reversed(candidates))
    relocate, trees, launch = Deployment.RELOCATE, Deployment.TREES, Deployment.LAUNCH
    # Relocated calls run ahead of the GPU: a block of launches lets it come to them before trees are tried.
    return (relocate, launch, launch, relocate, relocate, launch, trees, trees, launch, launch, trees, trees)


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

    def gain_in_trees_us(self) -> float:
        """Return what a call saves in PyTorch's trees over the best of all else, as far as that is known."""

    def loss_in_trees_us(self) -> float | None:
        """Return what a call takes longer in trees than in the fastest way; None if that is not known, or they are no choice."""


class Rota:
    """Which deployment the measuring regions of a process run in now, and when they decide.

    A round begins when a region comes round again and all others that took part in earlier ones have come; that region chooses for
    all that follow until the next round, unless another one has more to choose from: what that needs is its turn, too. When all members of
    a round are ready, they decide in the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._attendance = _Attendance()
        self._current = Deployment.LAUNCH
        self._deciding = False
        # Forwards whose backward is still to come, of families whose backward is measured, too.
        self._open_forwards: dict[int, int] = {}
        self._overdue = 0
        self.round = 0
        """The number of this round."""

    def enter(self, member: Member) -> Deployment | None:
        """Return the deployment for a region that is called now; None: it should decide."""
        with self._lock:
            if self._begins_round(member):
                self._begin_round(member)
            self._attendance.note(member)
            self._follow_step(member)
            if self._deciding and member.ready():
                self._open_forwards.pop(member.family, None)
                return None
            self._members[id(member)] = member
            return self._current

    def see(self, member: Member) -> None:
        """Note the call of a region that is not measured yet: if others are, it is part of their rounds."""
        with self._lock:
            if self._members:
                self._attendance.note(member, warms_up=True)

    def measured_with(self, family: int) -> list[Member]:
        """Return the regions of a forward and its backward that take part in each round, and are not decided."""
        with self._lock:
            return [each for each in self._attendance.expected() if each.family == family]

    def leave(self, member: Member) -> None:
        """Note that a region is decided, and comes no more."""
        with self._lock:
            self._attendance.excuse(member)

    def _begins_round(self, member: Member) -> bool:
        if not self._members:
            return True
        # Who began rounds in the middle of a step, having come first by chance, is followed by who begins steps.
        if self._overdue and member.graph.kind is not Kind.BACKWARD and self._is_between_steps():
            return True
        if id(member) not in self._members:
            return False
        # A backward belongs to the step of its forward, unless none of the forwards is measured.
        kinds = {other.graph.kind for other in self._members.values()}
        if member.graph.kind is Kind.BACKWARD and kinds != {Kind.BACKWARD}:
            return False
        return self._attendance.is_complete()

    def _begin_round(self, leader: Member) -> None:
        between_steps = self._is_between_steps()
        if self._members:
            ready = all(member.ready() for member in self._members.values()) and self._attendance.is_warm()
            # Who has been called too often waits for nobody.
            self._deciding = leader.turns.exhausted or (ready and between_steps)
        # The leader if it has as many, as it comes first.
        wanted = max((leader, *self._members.values()), key=lambda each: each.turns.choices).turns.next()
        self._members.clear()
        self._attendance.begin()
        self.round += 1
        if wanted is self._current:
            self._overdue = 0
        elif between_steps or self._overdue >= MAX_OVERDUE:
            # A forward whose backward never comes must not hold everything up for ever.
            self._current, self._overdue = wanted, 0
            self._open_forwards = dict.fromkeys(self._open_forwards, 0)
        else:
            self._overdue += 1

    def _is_between_steps(self) -> bool:
        return not any(self._open_forwards.values())

    def _follow_step(self, member: Member) -> None:
        """Count the forwards whose backward is still to come: what they have saved belongs to their deployment."""
        if member.graph.partition != 0:
            return  # a forward may have more parts than its backward
        still_open = self._open_forwards.get(member.family)
        if member.graph.kind is Kind.BACKWARD:
            self._open_forwards[member.family] = max(0, (still_open or 0) - 1)
        elif member.graph.kind is Kind.FORWARD and still_open is not None:
            self._open_forwards[member.family] = still_open + 1


class _Attendance:
    """Which regions take part in rounds, and which of them have come in this one."""

    def __init__(self) -> None:
        self._came: weakref.WeakSet[Member] = weakref.WeakSet()
        self._expected: weakref.WeakSet[Member] = weakref.WeakSet()
        self._given_up: weakref.WeakKeyDictionary[Member, int] = weakref.WeakKeyDictionary()
        self._warming_up: weakref.WeakKeyDictionary[Member, int] = weakref.WeakKeyDictionary()
        self._patience = PATIENCE
        self._waited = 0
        self._calls = 0

    def note(self, member: Member, *, warms_up: bool = False) -> None:
        """Note that a region was called; from now on it is expected in each round."""
        self._calls += 1
        if member.graph.sizes:
            return  # it comes when its sizes do, which nobody can tell
        since_given_up = self._calls - self._given_up.pop(member, self._calls)
        if 0 < since_given_up < SOON * self._patience:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        if warms_up:
            self._warming_up[member] = self._warming_up.get(member, 0) + 1
        else:
            self._warming_up.pop(member, None)
        self._came.add(member)
        self._expected.add(member)

    def excuse(self, member: Member) -> None:
        """Note that a region comes no more."""
        self._came.discard(member)
        self._expected.discard(member)
        self._warming_up.pop(member, None)

    def expected(self) -> list[Member]:
        """Return who takes part in each round."""
        return list(self._expected)

    def begin(self) -> None:
        """Begin a round, in which nobody has come yet."""
        self._came.clear()
        self._waited = 0

    def is_complete(self) -> bool:
        """Whether all have come, or were waited for in vain; to be asked once for each call."""
        missing = [each for each in self._expected if each not in self._came]
        if not missing:
            return True
        self._waited += 1
        if self._waited <= self._patience:
            return False
        for each in missing:
            self._expected.discard(each)
            self._warming_up.pop(each, None)
            self._given_up[each] = self._calls
        return True

    def is_warm(self) -> bool:
        """Whether none of the regions is about to be measured, too."""
        return all(calls > WARM_UP_ROUNDS for calls in self._warming_up.values())
