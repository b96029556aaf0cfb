"""A folder with a daemon of its own, and the means to talk to it; whatever it started is ended, by pid."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

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
from tests.support.daemon_home import Home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "home")
    opened.path.mkdir(mode=0o700)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Return a home whose daemon serves all tests of a file that leave it as they found it."""
    opened = Home(tmp_path_factory.mktemp("shared"))
    opened.path.chmod(0o700)
    try:
        opened.start()
        yield opened
    finally:
        opened.close()


@pytest.fixture
def make_request() -> Callable[..., RecordRequest]:
    """Return a maker of requests that record one graph for each name."""

    def make(*names: str, gpu: str = "NVIDIA H200") -> RecordRequest:
        environment = Environment(gpu, "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")
        return RecordRequest(environment, Origin("here", "0.1.0"), tuple(map(_record, names)))

    return make


def _record(name: str) -> Record:
    graph = Graph(hashlib.sha256(name.encode()).hexdigest(), Kind.FORWARD, 0, 1, 5)
    measured = Measurement(Deployment.KERNELS, 12, 100.0, 1.0, 90.0, 80.0, 0.5)
    return Record(
        graph, Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "it is fastest"), 1), (measured,)
    )
