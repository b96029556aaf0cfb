"""What this process does for its process group, and what it leaves to other ranks; `consensus` says how they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.decisions.ranks.consensus import ALONE, Part
from pygraphd.client.decisions.ranks.process_group import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.common.report import Report
    from pygraphd.schema.keys import Environment
    from pygraphd.schema.messages import Graph


class Ranks:
    """The process group as a runtime sees it."""

    def __init__(self, report: Report) -> None:
        self.groups = Groups(report)
        self._report = report

    def part(self, claim: str, graphs: Sequence[Graph], environment: Environment) -> Part:
        """Return what this process has to do about some graphs: all of it, unless ranks share it.

        One rank leads for all graphs with the same `claim`: a forward and its backward, which are measured together.
        """
        agreement = self.groups.agreement()
        if agreement is None:
            return ALONE
        part = agreement.part(claim, [graph.digest for graph in graphs], environment.digest())
        self._report.count(**{"led" if part.leads else "followed": len(graphs)})
        return part
