"""Whose turn it is: the balanced order in which measuring regions try the deployments on real calls.

Two levels. `Turns` is one region's own order: blocks of A B B A, and trees last where there are relocatable graphs, too, as they may
not be needed. `Rota` makes all regions of one step follow one of them, decide in the same step, and change deployments only between a backward and the next
forward: PyTorch's CUDA Graph trees depend on what ran before, and record anew for every mixture of captured and launched
graphs. Knows nothing of torch.
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
"""Calls in a row before the order moves on; the first after a change is never counted."""
SAMPLES = policy.MIN_SAMPLES
"""Samples of each deployment that end measuring."""
MAX_CALLS = 400
"""Calls after which measuring ends with what there is; two dozen are usual."""
MAX_OVERDUE = 100
"""Rounds that a change may wait for open forwards: more than a step has, if its layers share one graph."""
UNCOUNTED = {Deployment.LAUNCH: 1, Deployment.TREES: 3, Deployment.RELOCATE: 4}
"""A deployment's first calls in a process, which pay for setting it up. Trees warm up, record, then replay; relocatable graphs
see that sizes come back, record, replay, and in training begin to keep memory."""


class Turns:
    """One region's progress through the deployments it may run in, `candidates`."""

    def __init__(self, candidates: tuple[Deployment, ...]) -> None:
        self.choices = len(candidates)
        self._order = _order(candidates)
        self._calls: Counter[Deployment] = Counter()
        self._previous: Deployment | None = None

    @property
    def exhausted(self) -> bool:
        """Whether so many calls have not been enough."""
        return self._calls.total() >= MAX_CALLS

    def next(self) -> Deployment:
        """Return the deployment that this region would run in if it could choose."""
        return self._order[self._calls.total() // BLOCK % len(self._order)]

    def take(self, deployment: Deployment) -> bool:
        """Note that the region now runs in `deployment`; return whether this call is a fair sample of it."""
        fair = deployment is self._previous and self._calls[deployment] >= UNCOUNTED[deployment]
        self._calls[deployment] += 1
        self._previous = deployment
        return fair


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


class Rota:
    """Which deployment the measuring regions of a process run in now, and when they decide.

    A round begins when a region comes round again; that region chooses for all that follow until the next round, unless another
    one has more to choose from: what that needs is its turn, too. When all members of a round are ready, they decide in the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._current = Deployment.LAUNCH
        self._deciding = False
        # Forwards whose backward is still to come, of families whose backward is measured, too.
        self._open_forwards: dict[int, int] = {}
        self._overdue = 0

    def enter(self, member: Member) -> Deployment | None:
        """Return the deployment for a region that is called now; None: it should decide."""
        with self._lock:
            if self._begins_round(member):
                self._begin_round(member)
            self._follow_step(member)
            if self._deciding and member.ready():
                self._open_forwards.pop(member.family, None)
                return None
            self._members[id(member)] = member
            return self._current

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
        return member.graph.kind is not Kind.BACKWARD or kinds == {Kind.BACKWARD}

    def _begin_round(self, leader: Member) -> None:
        between_steps = self._is_between_steps()
        if self._members:
            ready = all(member.ready() for member in self._members.values())
            self._deciding = ready and (between_steps or leader.turns.exhausted)
        # The leader if it has as many, as it comes first.
        wanted = max((leader, *self._members.values()), key=lambda each: each.turns.choices).turns.next()
        self._members.clear()
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
