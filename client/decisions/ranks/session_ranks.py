"""What this process does for its process group, and what it leaves to other ranks; `consensus` says how they agree."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from pygraphd.client.decisions import rules
from pygraphd.client.decisions.ranks.consensus import ALONE, Part, possible
from pygraphd.client.decisions.ranks.following import Follower
from pygraphd.client.decisions.ranks.process_group import Groups
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.schema.keys import Environment
    from pygraphd.schema.messages import Decision, Deployment, Graph


class Ranks:
    """The process group as a session sees it; `family` is one object for a forward and its backward."""

    def __init__(self, report: Report) -> None:
        self.groups = Groups(report)
        self._report = report
        self._families: dict[int, object] = {}  # kept alive, so that their ids stay theirs
        self._claims: dict[int, str] = {}
        self._followers: dict[int, tuple[Graph, Environment]] = {}
        self._numbers = itertools.count()

    def part(self, family: object, graphs: Sequence[Graph], environment: Environment) -> Part:
        """Return what this process has to do about some graphs: all of it, unless ranks share it.

        One rank leads for a forward and its backward, which are measured together.
        """
        agreement = self.groups.agreement()
        if agreement is None:
            return ALONE
        self._families[id(family)] = family
        claim = self._claims.setdefault(id(family), graphs[0].digest)
        part = agreement.part(claim, [graph.digest for graph in graphs], environment.digest())
        self._report.count(**{"led" if part.leads else "followed": len(graphs)})
        return part

    def agree(
        self, part: Part, graph: Graph, decision: Decision, offered: tuple[Deployment, ...]
    ) -> Decision:
        """Return what is to run, of what is offered, now that this rank has come to a decision."""
        return possible(part.propose(graph.digest, decision), offered)

    def follow(
        self,
        graph: Graph,
        environment: Environment,
        launch: Runnable,
        part: Part,
        deploy: Callable[[Follower, Decision], Runnable],
    ) -> Follower:
        """Return what runs a graph until another rank has decided; `deploy` then puts the decision in place."""
        number = next(self._numbers)
        self._followers[number] = graph, environment

        def followed(follower: Follower, decision: Decision) -> Runnable:
            self._followers.pop(number, None)
            return deploy(follower, decision)

        ask = functools.partial(part.wait, graph.digest)
        return Follower(launch, ask, followed, self._report)

    def followed(self, graph: Graph, environment: Environment, decision: Decision) -> None:
        """Report another rank's decision for a graph that waited for it."""
        self._report.record_deployment(graph, environment, decision, Source.GROUP)

    def close(self) -> None:
        """Report what still waits."""
        while self._followers:
            _, (graph, environment) = self._followers.popitem()
            decision = rules.not_measured(Reason(ReasonCode.RANKS_UNDECIDED))
            self._report.record_deployment(graph, environment, decision, Source.UNFINISHED)
