"""A record of a graph, and the folders of a user without a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Record,
)
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = Environment("none", "", 0, 0, "", "2.13.0", "", "", "", "")
GRAPH = "a" * 64
DECISION = Decision(Deployment.KERNELS, Reason(ReasonCode.NO_DEVICE), 1)
RECORD = Record(Graph(GRAPH, Kind.FORWARD, 0, 1, 3), DECISION)


@pytest.fixture
def places(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path)})
