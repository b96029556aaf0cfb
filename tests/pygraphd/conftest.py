"""Records to put into a store, and a store to put them into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.store import Store
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    RecordRequest,
)
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from pathlib import Path

RequestMaker = Callable[..., RecordRequest]


def _environment(gpu: str) -> Environment:
    return Environment(gpu, "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")


def _record(name: str, deployment: Deployment, final: bool, median_us: float, calls: int) -> Record:
    graph = Graph(hashlib.sha256(name.encode()).hexdigest(), Kind.INFERENCE, 0, 3, 17)
    decision = Decision(
        deployment, Reason(ReasonCode.OTHER, f"{deployment} is fastest"), policy=1, final=final, calls=calls
    )
    measurements = tuple(
        Measurement(d, 12, median_us, 1.5, 90.0, 80.0, 0.25) for d in (Deployment.KERNELS, deployment)
    )
    return Record(graph, decision, tuple({m.deployment: m for m in measurements}.values()))


@pytest.fixture
def make_request() -> RequestMaker:
    """Return a maker of requests: `make_request("a", "b", gpu=..., deployment=..., final=..., median_us=...)`."""

    def make(
        *names: str,
        gpu: str = "NVIDIA H200",
        deployment: Deployment = Deployment.GRAPH,
        final: bool = True,
        median_us: float = 100.0,
        calls: int = 24,
    ) -> RecordRequest:
        records = tuple(_record(name, deployment, final, median_us, calls) for name in names)
        return RecordRequest(_environment(gpu), Origin("host-a", "0.1.0"), records)

    return make


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


@pytest.fixture
def store(database: Path) -> Iterator[Store]:
    with Store(database) as opened:
        yield opened
