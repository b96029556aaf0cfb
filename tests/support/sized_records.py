"""Records of one made-up graph at some dynamic sizes, in one environment."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    SizesRequest,
)
from pygraphd.schema.policy import POLICY_VERSION, only_kernels
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.record_requests import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pygraphd.schema.keys import Environment
    from pygraphd.schema.messages import SizedEntry

HERE = ENVIRONMENT
WHOLE = Graph(hashlib.sha256(b"whole").hexdigest(), Kind.INFERENCE, 0, 1, 5)
MEASURED = tuple(
    Measurement(each, 12, cost_us, 1.0, cost_us / 2, 40.0, 0.5, 0.5, 0.25)
    for each, cost_us in ((Deployment.KERNELS, 100.0), (Deployment.GRAPH, 60.0))
)


def sized_record(*sizes: int, whole: Graph = WHOLE, final: bool = True) -> Record:
    """Return a measured decision for GRAPH at some sizes."""
    decision = Decision(Deployment.GRAPH, Reason(ReasonCode.SAVES_HOST_TIME), POLICY_VERSION, final)
    return Record(whole.at(sizes), decision, MEASURED)


def sized_request(*each: int, environment: Environment = HERE) -> RecordRequest:
    """Return a request that records the graph as decided by sizes, and one decision for each size."""
    whole = Record(WHOLE, only_kernels(Reason(ReasonCode.DECIDED_BY_SIZE)))
    return RecordRequest(environment, Origin("here", "0.1.0"), (whole, *map(sized_record, each)))


def asked(most: int = 64, environment: Environment = HERE) -> SizesRequest:
    """Return the request for the sizes of the graph."""
    return SizesRequest(environment.digest(), WHOLE.digest, most)


def first_sizes(found: Iterable[SizedEntry]) -> list[int]:
    """Return the first size of each entry."""
    return [each.sizes[0] for each in found]
