"""Without a daemon the client reads files, for a bounded time, whatever lies there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions import spool
from pygraphd.client.decisions.service import Cache
from pygraphd.daemon.store import Store
from pygraphd.schema import messages
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind, Record, RecordRequest
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = Environment("none", "", 0, 0, "", "2.13.0", "", "", "", "")
GRAPH = "a" * 64
RECORD = Record(
    Graph(GRAPH, Kind.FORWARD, 0, 1, 3), Decision(Deployment.KERNELS, Reason(ReasonCode.NO_DEVICE), 1)
)


@pytest.fixture
def places(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path)})


@pytest.mark.parametrize(("files", "found"), [(1, True), (2, False)])
def test_full_files_in_the_spool_are_read_up_to_a_size(places: Locations, files: int, found: bool) -> None:
    """Which bounds the time. The newest come first, so what is not read is old."""
    Cache(places, "host", Report()).record(ENVIRONMENT, [RECORD])
    full = b"{" + b" " * (spool.MAX_READ_BYTES * 2 // 3) + b"}"
    for number in range(files):
        (places.spool / f"9-{number}.json").write_bytes(full)

    assert bool(Cache(places, "host", Report()).lookup(ENVIRONMENT, [GRAPH])) is found


@pytest.mark.parametrize("name", ["cache.db", "cache.db-wal", "cache.db-shm", "pygraphd.lock", "spool"])
def test_no_pipe_is_waited_for(places: Locations, name: str) -> None:
    with Store(places.database) as store:
        store.record(RecordRequest(ENVIRONMENT, messages.Origin("host", "1"), (RECORD,)), os.getuid())
    (places.cache / name).unlink(missing_ok=True)
    os.mkfifo(places.cache / name)
    cache = Cache(places, "host", report := Report())

    found = cache.lookup(ENVIRONMENT, [GRAPH])
    cache.record(ENVIRONMENT, [RECORD])

    assert bool(found) is ("cache.db" not in name)
    assert bool([each for each in report.failures if each.startswith("database: ")]) is ("cache.db" in name)
