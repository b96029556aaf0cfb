"""The roles of this process in its process group: leader of some graphs, follower of others. `consensus` has the agreement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.decisions.ranks.consensus import ALONE, RankRole
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

    def role(self, leader_key: str, graphs: Sequence[Graph], environment: Environment) -> RankRole:
        """Return the role of this process for some graphs; without a process group it decides alone.

        One rank leads for all graphs with the same `leader_key`: a forward and its backward, which are measured together.
        """
        agreement = self.groups.agreement()
        if agreement is None:
            return ALONE
        role = agreement.role(leader_key, [graph.digest for graph in graphs], environment.digest())
        self._report.count(**{"led" if role.leads else "followed": len(graphs)})
        return role
