"""Without a daemon the client reads files, for a bounded time, whatever lies there."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions import spool
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.decisions.trust import Trust, TrustPolicy
from pygraphd.daemon.store import Store
from pygraphd.schema import messages
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Kind, Record, RecordRequest
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.shipped import SHIPPED
from tests.support.shipped_rows import FASTER, H100, KERNELS, row, written

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


def test_of_256_full_files_in_the_spool_few_are_read(
    places: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the spool may hold: they delayed a client without a daemon by seconds."""
    Cache(places, "host", Report()).record(ENVIRONMENT, [RECORD])
    for number in range(256):
        (places.spool / f"9-{number}.json").write_bytes(b"{" + b" " * 65_536 + b"}")
    read: list[int] = []
    original = spool._read_own

    def counted(path: Path) -> tuple[bytes, float]:
        body, left_at = original(path)
        read.append(len(body))
        return body, left_at

    monkeypatch.setattr(spool, "_read_own", counted)
    assert Cache(places, "host", Report()).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert spool.MAX_READ_BYTES <= sum(read) < spool.MAX_READ_BYTES + 65_538


@pytest.mark.parametrize(("mode", "found"), [(0o700, True), (0o755, True), (0o775, False), (0o777, False)])
def test_a_database_that_others_could_have_put_there_is_not_believed(
    places: Locations, mode: int, found: bool
) -> None:
    with Store(places.database) as store:
        store.record(RecordRequest(ENVIRONMENT, messages.Origin("host", "1"), (RECORD,)), os.getuid())
    places.cache.chmod(mode)
    cache = Cache(places, "host", report := Report())

    assert bool(cache.lookup(ENVIRONMENT, [GRAPH])) is found
    assert (
        any("others can write to it" in each or "chmod 700" in each for each in report.failures) is not found
    )


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


@pytest.mark.parametrize("asked_for", [True, False])
def test_shipped_decisions_are_read_below_the_users_own(
    places: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: bool
) -> None:
    written(tmp_path / "exports", *(row(name, KERNELS, FASTER) for name in ("a", "b")))
    monkeypatch.setenv("PYGRAPHD_SHIPPED", str(tmp_path / "exports") if asked_for else "0")
    a, b = (row(name).record.graph.digest for name in ("a", "b"))
    Cache(places, "here", Report()).record(H100, [row("a", KERNELS, FASTER).record])
    cache = Cache(places, "here", report := Report())

    found = cache.lookup(H100, [a, b])

    hosts = {graph: entry.host for graph, entry in found.items()}
    assert hosts == ({a: "here", b: "shipped:lab"} if asked_for else {a: "here"})
    assert not [each for each in report.failures if "shipped" in each]


def test_a_shipped_file_that_is_refused_is_a_failure_that_is_counted(
    places: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "exports", row("a", KERNELS, FASTER)).write_text("{}\n")
    monkeypatch.setenv("PYGRAPHD_SHIPPED", str(tmp_path / "exports"))
    cache = Cache(places, "here", report := Report())

    assert cache.lookup(H100, [GRAPH]) == {}
    assert [each for each in report.failures if each.startswith("shipped: ")]


def test_a_shipped_decision_is_foreign_and_does_not_grow_too_old() -> None:
    decision = replace(RECORD.decision, policy=POLICY_VERSION)
    old = Entry(GRAPH, decision, None, f"{SHIPPED}lab", 1.0, 1e9, 1.0, 1.0)

    assert TrustPolicy("here", max_age_s=60.0).why_not_trusted(old) is None
    assert TrustPolicy("here").must_validate(old)
    assert TrustPolicy("here", Trust.LOCAL).why_not_trusted(old) is not None
