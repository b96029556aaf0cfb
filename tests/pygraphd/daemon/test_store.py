from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import dataclasses
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from benchmarks.large_cache import fill
from pygraphd.cli.catalogue import Catalogue
from pygraphd.daemon.database_files import BALLAST_BYTES, ballast_file, files_set_aside
from pygraphd.daemon.pruning import PruneAnswer, PruneRequest
from pygraphd.daemon.queries import KEPT_MEASUREMENTS
from pygraphd.daemon.store import DiskFullError, Store, StoreError
from pygraphd.schema.messages import Deployment, LookupRequest, Origin, RecordRequest
from pygraphd.schema.offline import DATABASE_VERSION, read_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def _query(database: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute(statement).fetchall()
        connection.commit()
        return rows
    finally:
        connection.close()


def _answer(database: Path, request: RecordRequest) -> Deployment:
    digests = (request.records[0].graph.digest,)
    (entry,) = read_entries(database, LookupRequest(request.environment.digest(), digests))
    return entry.decision.deployment


def test_a_new_database_is_set_up_as_intended(store: Store, database: Path) -> None:
    assert store.problems() == []
    assert _query(database, "PRAGMA journal_mode") == [("wal",)]
    assert _query(database, "PRAGMA user_version") == [(DATABASE_VERSION,)]
    assert _query(database, "PRAGMA auto_vacuum") == [(2,)]
    assert ballast_file(database).stat().st_size == BALLAST_BYTES


def test_what_is_recorded_is_there(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    assert store.record(make_request("a", "b"), uid=1000) == 2
    assert store.count_entries() == 2
    assert (
        _query(database, "SELECT deployment, uid, host, hits FROM decision")
        == [("GRAPH", 1000, "host-a", 0)] * 2
    )
    assert _query(database, "SELECT count(*), min(host), min(uid) FROM measurement") == [(4, "host-a", 1000)]
    assert _query(database, "SELECT gpu, driver FROM environment") == [("NVIDIA H200", "580.1")]


def test_it_is_there_after_closing_and_opening(
    database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    with Store(database) as first:
        first.record(make_request("a"), uid=0)
    assert not database.with_name("cache.db-wal").exists()
    with Store(database) as second:
        assert second.count_entries() == 1


def test_a_record_that_was_left_in_the_spool_too_is_stored_once(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    """As by a client that did not wait for the answer; in whatever order the two come, or with others between."""
    store.record(make_request("a", "b"), uid=7)
    store.record(make_request("a", median_us=99.0, final=False), uid=8)
    store.record(make_request("a", "b"), uid=7)

    with contextlib.closing(sqlite3.connect(database)) as connection:
        counted = connection.execute("SELECT uid, count(*) FROM measurement GROUP BY uid").fetchall()
    assert counted == [(7, 4), (8, 2)]


def test_after_the_clock_was_set_back_the_later_record_still_replaces(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e8)
    store.record(make_request("a"), uid=0)
    monkeypatch.setattr(time, "time", lambda: now)
    later = make_request("a", deployment=Deployment.KERNELS, median_us=200.0)
    store.record(later, uid=0)

    assert _answer(database, later) is Deployment.KERNELS
    with Catalogue(database) as catalogue:
        ((entry,),) = catalogue.pages()
    assert entry.medians_us["KERNELS"] == 200.0
    assert store.prune(PruneRequest(older_than_s=3600.0)).entries == 0


def test_a_newer_record_replaces_the_decision_and_adds_measurements(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    store.record(make_request("a"), uid=0)
    store.record(make_request("a", deployment=Deployment.KERNELS), uid=0)
    assert _answer(database, make_request("a")) == Deployment.KERNELS
    assert store.count_entries() == 1
    assert _query(database, "SELECT count(*) FROM measurement WHERE deployment = 'KERNELS'") == [(2,)]


def test_a_decision_is_stored_with_what_it_rests_on(
    store: Store,
    database: Path,
    make_request: Callable[..., RecordRequest],
) -> None:
    request = make_request("a")
    store.record(request, uid=0)
    store.record(dataclasses.replace(request, origin=Origin("host-b", "1")), uid=0)
    ((host, measured_at),) = _query(database, "SELECT host, measured_at FROM decision")
    assert host == "host-b"
    assert [(measured_at,)] == _query(database, "SELECT max(measured_at) FROM measurement")


@pytest.mark.parametrize("spreads", [(1.5, 0.25), (None, None)])
def test_a_measurement_is_stored_with_its_spreads(
    store: Store,
    database: Path,
    make_request: Callable[..., RecordRequest],
    spreads: tuple[float | None, float | None],
) -> None:
    request = make_request("a", deployment=Deployment.KERNELS)
    (record,) = request.records
    (measured,) = record.measurements
    measured = dataclasses.replace(measured, host_mad_us=spreads[0], span_mad_us=spreads[1])
    record = dataclasses.replace(record, measurements=(measured,))
    store.record(dataclasses.replace(request, records=(record,)), uid=0)
    assert _query(database, "SELECT mad_us, host_mad_us, span_mad_us FROM measurement") == [(1.5, *spreads)]


def test_a_graph_is_stored_with_its_sizes(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    request = make_request("a")
    (record,) = request.records
    at_sizes = dataclasses.replace(record, graph=record.graph.at((8, -1)))
    store.record(dataclasses.replace(request, records=(record, at_sizes)), uid=0)
    with Catalogue(database) as catalogue:
        (page,) = catalogue.pages()
    found = {entry.facts["graph"]: entry.facts["sizes"] for entry in page}
    assert found == {record.graph.digest: [], at_sizes.graph.digest: [8, -1]}


def test_a_decision_by_a_rule_rests_on_no_measurement(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    request = make_request("a")
    store.record(request, uid=0)
    (record,) = request.records
    store.record(dataclasses.replace(request, records=(dataclasses.replace(record, measurements=()),)), uid=0)
    assert _query(database, "SELECT measured_at FROM decision") == [(None,)]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [(True, True, "second"), (True, False, "first"), (False, True, "second"), (False, False, "second")],
)
def test_a_guess_never_replaces_a_final_decision(
    store: Store,
    database: Path,
    make_request: Callable[..., RecordRequest],
    first: bool,
    second: bool,
    kept: str,
) -> None:
    store.record(make_request("a", deployment=Deployment.KERNELS, final=first), uid=0)
    store.record(make_request("a", deployment=Deployment.GRAPH, final=second), uid=0)
    expected = Deployment.KERNELS if kept == "first" else Deployment.GRAPH
    assert _answer(database, make_request("a")) == expected
    assert _query(database, "SELECT count(DISTINCT deployment) FROM measurement") == [(2,)]


@pytest.mark.parametrize(("policy", "replaced"), [(0, False), (1, False), (2, True)])
def test_a_guess_replaces_only_what_an_older_policy_decided(
    store: Store,
    database: Path,
    make_request: Callable[..., RecordRequest],
    policy: int,
    replaced: bool,
) -> None:
    """Nobody uses that, and else every program would begin as if nothing were known."""
    store.record(make_request("a", deployment=Deployment.KERNELS), uid=0)  # of policy 1
    guess = make_request("a", deployment=Deployment.GRAPH, final=False)
    (record,) = guess.records
    record = dataclasses.replace(record, decision=dataclasses.replace(record.decision, policy=policy))
    store.record(dataclasses.replace(guess, records=(record,)), uid=0)
    assert _answer(database, guess) == (Deployment.GRAPH if replaced else Deployment.KERNELS)


def test_only_the_newest_measurements_are_kept(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    store.record(make_request("b"), uid=0)
    for number in range(KEPT_MEASUREMENTS + 3):
        store.record(make_request("a", median_us=float(number)), uid=0)
    digest = make_request("a").records[0].graph.digest
    rows = _query(
        database,
        f"SELECT deployment, count(*), min(median_us) FROM measurement WHERE graph = '{digest}' GROUP BY 1",
    )
    assert rows == [("GRAPH", KEPT_MEASUREMENTS, 3.0), ("KERNELS", KEPT_MEASUREMENTS, 3.0)]
    assert _query(database, f"SELECT count(*) FROM measurement WHERE graph <> '{digest}'") == [(2,)]


def test_what_a_decision_rests_on_is_kept_whatever_is_measured_later(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    store.record(make_request("a", median_us=50.0), uid=0)
    for number in range(KEPT_MEASUREMENTS + 3):
        store.record(make_request("a", final=False, median_us=100.0 + number), uid=0)

    request = make_request("a")
    digests = (request.records[0].graph.digest,)
    (entry,) = read_entries(database, LookupRequest(request.environment.digest(), digests))
    assert (entry.decision.final, entry.cost_us) == (True, 50.0)
    kept = "SELECT deployment, count(*) FROM measurement WHERE median_us >= 100 GROUP BY 1"
    assert _query(database, kept) == [("GRAPH", KEPT_MEASUREMENTS), ("KERNELS", KEPT_MEASUREMENTS)]

    store.record(make_request("a", median_us=60.0), uid=0)
    store.record(make_request("a", final=False, median_us=200.0), uid=0)

    medians = _query(database, "SELECT count(*), min(median_us) FROM measurement WHERE deployment = 'GRAPH'")
    assert medians == [(KEPT_MEASUREMENTS, 60.0)], "what it rested on before is as old as any"


def test_hits_are_added_and_survive_a_new_decision(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    request = make_request("a")
    key = (request.environment.digest(), request.records[0].graph.digest)
    store.record(request, uid=0)
    store.add_hits({key: (3, 100.0), ("0" * 64, "1" * 64): (1, 100.0)})
    store.add_hits({key: (2, 200.0)})
    store.record(request, uid=0)
    assert _query(database, "SELECT hits, last_hit FROM decision") == [(5, 200.0)]


class TestPrune:
    @pytest.fixture
    def filled(self, store: Store, database: Path, make_request: Callable[..., RecordRequest]) -> Store:
        """Two entries of an H200, one of them unused for 40 days, and one of an A100."""
        store.record(make_request("old", "new"), uid=0)
        store.record(make_request("other", gpu="NVIDIA A100-SXM4-40GB"), uid=0)
        digest = make_request("old").records[0].graph.digest
        _query(
            database, f"UPDATE decision SET created_at = {time.time() - 40 * 86400} WHERE graph = '{digest}'"
        )
        return store

    def test_by_age(self, filled: Store, database: Path) -> None:
        answer = filled.prune(PruneRequest(older_than_s=30 * 86400))
        assert (answer.entries, answer.measurements) == (1, 2)
        assert _query(database, "SELECT count(*) FROM graph") == [(2,)]
        assert filled.count_entries() == 2

    def test_a_hit_keeps_an_old_entry(self, filled: Store, database: Path) -> None:
        _query(database, f"UPDATE decision SET last_hit = {time.time()}")
        assert filled.prune(PruneRequest(older_than_s=30 * 86400)).entries == 0

    def test_by_gpu(self, filled: Store, database: Path) -> None:
        assert filled.prune(PruneRequest(gpu="a100")).entries == 1
        assert _query(database, "SELECT gpu FROM environment") == [("NVIDIA H200",)]

    def test_a_percent_sign_is_no_wildcard(self, filled: Store) -> None:
        assert filled.prune(PruneRequest(gpu="%")).entries == 0

    def test_both_conditions_must_hold(self, filled: Store) -> None:
        assert filled.prune(PruneRequest(30 * 86400, "a100")).entries == 0
        assert filled.prune(PruneRequest(30 * 86400, "h200")).entries == 1

    def test_a_dry_run_says_the_same_and_deletes_nothing(self, filled: Store) -> None:
        dry = filled.prune(PruneRequest(gpu="H200", dry_run=True))
        assert dry == PruneAnswer(2, 4, 0, dry_run=True)
        assert filled.count_entries() == 3
        real = filled.prune(PruneRequest(gpu="H200"))
        assert (real.entries, real.measurements) == (dry.entries, dry.measurements)

    def test_the_file_shrinks(self, store: Store, make_request: Callable[..., RecordRequest]) -> None:
        for number in range(10):
            store.record(make_request(*(f"{number}.{n}" for n in range(100))), uid=0)
        answer = store.prune(PruneRequest(gpu="H200"))
        assert (answer.entries, answer.measurements) == (1000, 2000)
        assert answer.freed_bytes > 500_000


class TestFaults:
    @pytest.fixture
    def small(self, database: Path) -> Iterator[Store]:
        """A store whose database may not grow beyond some 50 entries: SQLite says that the disk is full."""

        def limit(connection: sqlite3.Connection, _entry: object) -> None:
            connection.execute("PRAGMA max_page_count=40")

        sa.event.listen(sa.engine.Engine, "connect", limit)
        try:
            with Store(database) as opened:
                yield opened
        finally:
            sa.event.remove(sa.engine.Engine, "connect", limit)

    def _fill(self, store: Store, make_request: Callable[..., RecordRequest]) -> int:
        for number in range(1000):
            try:
                store.record(make_request(str(number)), uid=0)
            except DiskFullError:
                return number
        raise AssertionError("the store never filled up")

    def test_a_full_disk_is_said_and_prune_frees_it(
        self, small: Store, database: Path, make_request: Callable[..., RecordRequest]
    ) -> None:
        stored = self._fill(small, make_request)
        assert stored == small.count_entries() > 10
        (problem,) = small.problems()
        assert "the disk is full" in problem
        assert "pygraphd cache prune" in problem
        assert _answer(database, make_request("0")) == Deployment.GRAPH
        assert small.prune(PruneRequest(gpu="H200")).entries == stored
        assert small.problems() == []
        assert small.record(make_request("again"), uid=0) == 1

    def test_a_record_is_stored_whole_or_not_at_all(
        self, small: Store, make_request: Callable[..., RecordRequest]
    ) -> None:
        with pytest.raises(DiskFullError):
            small.record(make_request(*map(str, range(500))), uid=0)
        assert small.count_entries() == 0

    @pytest.mark.parametrize("damage", ["header", "truncated", "page"])
    def test_a_damaged_file_is_set_aside(
        self, database: Path, make_request: Callable[..., RecordRequest], damage: str
    ) -> None:
        with Store(database) as store:
            store.record(make_request(*map(str, range(50))), uid=0)
        _damage(database, damage)
        content = database.read_bytes()
        with Store(database) as store:
            assert store.count_entries() == 0
            assert store.record(make_request("a"), uid=0) == 1
        (aside,) = files_set_aside(database)
        assert aside.name.startswith("cache.db.corrupt-2")
        assert aside.read_bytes() == content

    def test_another_programs_database_is_set_aside(
        self, database: Path, make_request: Callable[..., RecordRequest]
    ) -> None:
        _query(database, "CREATE TABLE precious (x)")
        with Store(database) as store:
            assert store.record(make_request("a"), uid=0) == 1
        (aside,) = files_set_aside(database)
        assert aside.name.startswith("cache.db.foreign-2")
        assert _query(aside, "SELECT count(*) FROM precious") == [(0,)]

    def test_another_programs_database_of_a_high_version_is_left_as_it_is(self, database: Path) -> None:
        """As those of browsers are; our own with such a version is a newer pygraphd's."""
        _query(database, "CREATE TABLE precious (x)")
        _query(database, "PRAGMA user_version=75")
        content = database.read_bytes()
        with Store(database) as store:
            assert store.problems() == [
                f"{database}: is another program's database; nothing is stored: move it to where that program looks"
                " for it, or set PYGRAPHD_HOME to another folder"
            ]
        assert (database.read_bytes(), files_set_aside(database)) == (content, [])

    def test_two_damaged_files_in_one_second_are_both_kept(self, database: Path) -> None:
        for _ in range(2):
            database.write_bytes(b"garbage" * 1000)
            Store(database).close()
        assert len(files_set_aside(database)) == 2

    def test_a_newer_database_is_left_as_it_is(
        self, database: Path, make_request: Callable[..., RecordRequest]
    ) -> None:
        with Store(database) as store:
            store.record(make_request("a"), uid=0)
        _query(database, f"PRAGMA user_version={DATABASE_VERSION + 1}")
        content = database.read_bytes()
        with Store(database) as store:
            with pytest.raises(StoreError, match="written by a newer pygraphd"):
                store.record(make_request("b"), uid=0)
            assert "upgrade pygraphd" in store.problems()[0]
        assert database.read_bytes() == content
        assert not files_set_aside(database)

    def test_a_removed_database_is_begun_anew_and_said(
        self, store: Store, database: Path, make_request: Callable[..., RecordRequest]
    ) -> None:
        store.record(make_request("a"), uid=0)
        database.unlink()
        assert store.record(make_request("b"), uid=0) == 1
        assert _query(database, "SELECT count(*) FROM decision") == [(1,)]
        assert "was removed or replaced while in use" in store.problems()[0]

    def test_a_folder_that_appears_later_is_found(
        self, tmp_path: Path, make_request: Callable[..., RecordRequest]
    ) -> None:
        with Store(tmp_path / "later" / "cache.db") as store:
            assert "cannot be written: unable to open database file; nothing is stored" in store.problems()[0]
            with pytest.raises(StoreError, match="cannot be written"):
                store.record(make_request("a"), uid=0)
            (tmp_path / "later").mkdir()
            store.retry()
            assert store.problems() == []
            assert store.record(make_request("a"), uid=0) == 1


def _damage(database: Path, how: str) -> None:
    content = database.read_bytes()
    if how == "header":
        content = b"not a database at all" + content[21:]
    elif how == "truncated":
        content = content[: len(content) // 2]
    else:
        middle = len(content) // 8192 * 4096
        content = content[:middle] + bytes(8192) + content[middle + 8192 :]
    database.write_bytes(content)


def test_packing_takes_little_memory(database: Path) -> None:
    """A daemon keeps for ever what it took once: the allocator gives little back."""
    sqlite = ctypes.CDLL(_sqlite3.__file__)
    sqlite.sqlite3_memory_used.restype = sqlite.sqlite3_memory_highwater.restype = ctypes.c_int64
    fill(database, entries=6_000, old=0)
    with Store(database) as store:
        store.prune(PruneRequest(gpu="none of these"))  # fills the cache
        before = sqlite.sqlite3_memory_used()
        sqlite.sqlite3_memory_highwater(1)

        store.pack()

        assert before > 4 * 2**20
        assert sqlite.sqlite3_memory_highwater(0) - before < 2**20
