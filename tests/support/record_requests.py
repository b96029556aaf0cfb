"""Requests that record made-up graphs, each known by a name."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    LookupRequest,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    encode,
)
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENT = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")


def digest(name: str) -> str:
    """Return the graph digest that a name stands for."""
    return hashlib.sha256(name.encode()).hexdigest()


def record_request(
    names: Sequence[str], environment: Environment = ENVIRONMENT, policy: int = 1
) -> RecordRequest:
    """Return a request that records a final decision for each name."""
    records = tuple(_record(name, policy) for name in names)
    return RecordRequest(environment, Origin("here", "0.1.0"), records)


def lookup_body(*names: str, environment: Environment = ENVIRONMENT) -> bytes:
    """Return the body of a lookup of some graphs."""
    return encode(LookupRequest(environment.digest(), tuple(map(digest, names))))


def _record(name: str, policy: int) -> Record:
    graph = Graph(digest(name), Kind.FORWARD, 0, 1, 5)
    measured = Measurement(Deployment.KERNELS, 12, 100.0, 1.0, 90.0, 80.0, 0.5)
    return Record(
        graph, Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "it is fastest"), policy), (measured,)
    )
