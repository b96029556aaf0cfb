"""Entries carried from one real store to another: as they were there, and never in the place of what is known here."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.exporting import NOT_FINAL, Export
from pygraphd.daemon import tables
from pygraphd.daemon.exchange import ImportAnswer
from pygraphd.daemon.importing import foresee
from pygraphd.daemon.pruning import PruneRequest
from pygraphd.daemon.rederiving import NOT_VALID, RederiveRequest
from pygraphd.daemon.store import Store
from pygraphd.schema.messages import Deployment, Entry, LookupRequest, Origin, RecordRequest
from pygraphd.schema.offline import read_entries
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import ImportRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.portable import Portable

    RequestMaker = Callable[..., RecordRequest]

MONTH_S = 30 * 86_400.0
UID = 7


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Return a second database."""
    path = tmp_path / "there" / "cache.db"
    path.parent.mkdir(mode=0o700)
    return path


def current(request: RecordRequest, **changes: Any) -> RecordRequest:
    """Return the request as this version of the policy would have decided it."""
    records = [
        dataclasses.replace(
            each, decision=dataclasses.replace(each.decision, policy=POLICY_VERSION), **changes
        )
        for each in request.records
    ]
    return dataclasses.replace(request, records=tuple(records))


def exported(path: Path, *recorded: RecordRequest, **filters: str) -> tuple[Portable, ...]:
    """Record requests in a new database, and return what is exported from it."""
    with Store(path) as store:
        for request in recorded:
            store.record(request, UID)
    with Catalogue(path) as catalogue:
        return tuple(Export(catalogue, **filters))


def entry_of(database: Path, request: RecordRequest, index: int = 0) -> Entry:
    graph = request.records[index].graph.digest
    (entry,) = read_entries(database, LookupRequest(request.environment.digest(), (graph,)))
    return entry


def rows(database: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(database)
    try:
        found = connection.execute(statement).fetchall()
        connection.commit()
        return found
    finally:
        connection.close()


def test_what_is_imported_is_as_it_was_but_nobodys_here(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    request = current(make_request("a", "b"))
    recorded = tuple(dataclasses.replace(record, recording_us=2e6) for record in request.records)
    request = dataclasses.replace(request, records=recorded)
    entries = exported(there, request)
    assert {each.record.recording_us for each in entries} == {2e6}
    assert store.add_imported(ImportRequest(entries), uid=0) == ImportAnswer(added=2)
    before, after = entry_of(there, request), entry_of(database, request)
    assert (after.host, after.uid) == ("import:host-a", 0)
    assert dataclasses.replace(after, host="host-a", uid=UID) == before
    with Catalogue(database) as catalogue:
        back = tuple(Export(catalogue))
    assert {each.origin for each in back} == {Origin("import:host-a", "0.1.0")}
    assert [dataclasses.replace(each, origin=Origin("host-a", "0.1.0")) for each in back] == list(entries)


def test_only_what_a_decision_rests_on_goes_along(there: Path, make_request: RequestMaker) -> None:
    first = make_request("a", median_us=50.0)
    guess = make_request("a", median_us=70.0, final=False)
    (entry,) = exported(there, first, make_request("a", median_us=60.0), guess)
    assert {each.median_us for each in entry.record.measurements} == {60.0}
    assert {each.deployment for each in entry.record.measurements} == {Deployment.KERNELS, Deployment.GRAPH}


def test_what_is_not_final_or_not_valid_is_left_out_and_counted(
    there: Path, make_request: RequestMaker
) -> None:
    assert len(exported(there, make_request("a", "b", "c"), make_request("d", final=False))) == 3
    rows(
        there,
        "UPDATE decision SET deployment = 'ELSEWISE' WHERE id = (SELECT min(id) FROM decision WHERE final)",
    )
    rows(
        there,
        "DELETE FROM measurement WHERE graph = (SELECT graph FROM decision WHERE final ORDER BY id DESC)",
    )
    with Catalogue(there) as catalogue:
        found = Export(catalogue)
    assert (len(list(found)), found.left_out) == (1, {NOT_FINAL: 1, NOT_VALID: 2})


def test_filters(there: Path, make_request: RequestMaker) -> None:
    other = make_request("b", gpu="NVIDIA A100")
    assert len(exported(there, make_request("a"), other)) == 2
    with Catalogue(there) as catalogue:
        (by_gpu,) = Export(catalogue, gpu="a100")
        (by_graph,) = Export(catalogue, graph=other.records[0].graph.digest[:8].upper())
        assert list(Export(catalogue, gpu="100%")) == []
    assert by_gpu == by_graph
    assert by_gpu.environment == other.environment


def test_what_was_found_out_here_stays(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    ours = current(make_request("a", deployment=Deployment.KERNELS))
    store.record(ours, uid=0)
    (first, second) = exported(there, current(make_request("a", "b")))
    later = dataclasses.replace(first, measured_at=time.time() + 5)
    assert store.add_imported(ImportRequest((later, second)), uid=0) == ImportAnswer(added=1, kept=1)
    assert entry_of(database, ours).decision == ours.records[0].decision
    assert rows(database, "SELECT count(*) FROM measurement WHERE host = 'host-a'") == [(1,)]


def test_what_is_found_out_here_takes_the_place_of_an_import(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    theirs = current(make_request("a"))
    store.add_imported(ImportRequest(exported(there, theirs)), uid=0)
    ours = current(make_request("a", deployment=Deployment.KERNELS))
    store.record(ours, uid=0)
    assert (entry_of(database, ours).host, entry_of(database, ours).decision.deployment) == (
        "host-a",
        "KERNELS",
    )
    assert store.add_imported(ImportRequest(exported(there, theirs)), uid=0) == ImportAnswer(kept=1)


def test_a_guess_gives_way_to_what_a_longer_program_has_found_out(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    guess = make_request("a", deployment=Deployment.KERNELS, final=False)
    store.record(guess, uid=0)
    entries = exported(there, current(make_request("a")))
    assert store.add_imported(ImportRequest(entries), uid=0) == ImportAnswer(replaced=1)
    assert (entry_of(database, guess).decision.deployment, entry_of(database, guess).decision.final) == (
        "GRAPH",
        True,
    )


def test_what_is_found_out_here_for_now_takes_the_place_of_an_import_that_was_not_used(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    theirs = current(make_request("a", deployment=Deployment.GRAPH))
    store.add_imported(ImportRequest(exported(there, theirs)), uid=0)
    unmeasured = current(make_request("a", final=False), measurements=())
    store.record(unmeasured, uid=0)
    assert entry_of(database, theirs).host == "import:host-a"

    store.record(ours := current(make_request("a", final=False)), uid=0)

    assert (entry_of(database, ours).host, entry_of(database, ours).decision.final) == ("host-a", False)
    store.record(current(make_request("a")), uid=0)
    store.record(ours, uid=0)
    assert entry_of(database, ours).decision.final is True


def test_what_is_current_takes_the_place_of_what_nobody_uses_and_never_the_other_way_round(
    store: Store, database: Path, there: Path, tmp_path: Path, make_request: RequestMaker
) -> None:
    outdated = make_request("a", deployment=Deployment.KERNELS)
    store.record(outdated, uid=0)
    fresh = exported(there, current(make_request("a")))
    assert store.add_imported(ImportRequest(fresh), uid=0) == ImportAnswer(replaced=1)
    (tmp_path / "third").mkdir(mode=0o700)
    (older,) = exported(tmp_path / "third" / "cache.db", outdated)
    later = dataclasses.replace(older, measured_at=time.time())
    assert store.add_imported(ImportRequest((later,)), uid=0) == ImportAnswer(kept=1)
    assert entry_of(database, outdated).decision.policy == POLICY_VERSION


def test_of_rules_without_figures_the_current_one_stays(
    store: Store, there: Path, make_request: RequestMaker
) -> None:
    request = current(make_request("a"), measurements=())
    (rule,) = exported(there, request)
    older = dataclasses.replace(
        rule,
        record=dataclasses.replace(
            rule.record, decision=dataclasses.replace(rule.record.decision, policy=POLICY_VERSION - 1)
        ),
    )

    def import_(entry: Portable) -> ImportAnswer:
        return store.add_imported(ImportRequest((entry,)), uid=0)

    assert [import_(older), import_(rule), import_(older), import_(rule)] == [
        ImportAnswer(added=1),
        ImportAnswer(replaced=1),
        ImportAnswer(kept=1),
        ImportAnswer(kept=1),
    ]


def test_of_two_imports_the_one_measured_later_stays(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    request = current(make_request("a"))
    (newer,) = exported(there, request)
    assert newer.measured_at is not None
    older = dataclasses.replace(newer, origin=Origin("host-b", "0.1.0"), measured_at=newer.measured_at - 60)

    def import_(entry: Portable) -> tuple[ImportAnswer, str]:
        answer = store.add_imported(ImportRequest((entry,)), uid=0)
        return answer, entry_of(database, request).host

    assert import_(older) == (ImportAnswer(added=1), "import:host-b")
    assert import_(older) == (ImportAnswer(kept=1), "import:host-b")
    assert import_(newer) == (ImportAnswer(replaced=1), "import:host-a")
    assert import_(older) == (ImportAnswer(kept=1), "import:host-a")


def foreseen(database: Path, entries: tuple[Portable, ...]) -> ImportAnswer:
    with Catalogue(database) as catalogue:
        return catalogue.read(lambda connection: foresee(connection, entries, time.time()))


def test_what_is_foreseen_comes_true_and_stores_nothing(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    store.record(make_request("a"), uid=0)
    store.record(make_request("b", final=False), uid=0)
    entries = exported(there, current(make_request("a", "b", "c")))
    entries += entries[-1:]  # twice
    counts = (store.count_entries(), rows(database, "SELECT count(*) FROM measurement"))

    foretold = foreseen(database, entries)

    assert foretold == ImportAnswer(
        added=1, replaced=2, dry_run=True
    )  # what an older policy has decided here, too
    assert (store.count_entries(), rows(database, "SELECT count(*) FROM measurement")) == counts
    assert store.add_imported(ImportRequest(entries), uid=0) == ImportAnswer(added=1, replaced=2, kept=1)


def test_what_another_policy_has_decided_is_decided_anew(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    newer = current(make_request("a", "b"))
    decision = dataclasses.replace(newer.records[0].decision, policy=POLICY_VERSION + 1)
    newer = dataclasses.replace(
        newer, records=(dataclasses.replace(newer.records[0], decision=decision), newer.records[1])
    )
    assert store.add_imported(ImportRequest(exported(there, newer)), uid=0) == ImportAnswer(
        added=2, derived=1
    )
    assert {entry_of(database, newer, index).decision.policy for index in (0, 1)} == {POLICY_VERSION}
    assert store.rederive(RederiveRequest()).entries == 2


def test_an_old_measurement_is_as_old_as_it_was_but_is_not_pruned_when_it_has_just_come(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    (entry,) = exported(there, current(make_request("a")))
    old = dataclasses.replace(entry, measured_at=time.time() - 2 * MONTH_S)
    store.add_imported(ImportRequest((old,)), uid=0)
    assert store.prune(PruneRequest(older_than_s=MONTH_S)).entries == 0
    assert rows(database, "SELECT DISTINCT measured_at FROM measurement") == [(old.measured_at,)]


def test_a_clock_that_runs_ahead_elsewhere_makes_nothing_newer_than_now(
    store: Store, database: Path, there: Path, make_request: RequestMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = exported(there, current(make_request("a")))
    ahead = dataclasses.replace(entry, measured_at=time.time() + MONTH_S)
    store.add_imported(ImportRequest((ahead,)), uid=0)
    ((latest,),) = rows(database, "SELECT max(measured_at) FROM measurement")
    assert latest <= time.time()
    theirs = dataclasses.replace(entry, origin=Origin("host-b", "0.1.0"), measured_at=latest + 1e-3)
    monkeypatch.setattr(time, "time", lambda: latest + 0.01)
    assert store.add_imported(ImportRequest((theirs,)), uid=0) == ImportAnswer(replaced=1)


def test_an_entry_of_the_future_is_stored_once(
    store: Store, database: Path, there: Path, make_request: RequestMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    (entry,) = exported(there, current(make_request("a")))
    ahead = dataclasses.replace(entry, measured_at=2e9)
    assert store.add_imported(ImportRequest((ahead,)), uid=0) == ImportAnswer(added=1)
    stored = rows(database, "SELECT * FROM measurement")
    monkeypatch.setattr(time, "time", lambda: 1e9 + 60)

    assert foreseen(database, (ahead,)) == ImportAnswer(kept=1, dry_run=True)
    assert store.add_imported(ImportRequest((ahead,)), uid=0) == ImportAnswer(kept=1)

    assert rows(database, "SELECT * FROM measurement") == stored
    others = tuple(dataclasses.replace(each, median_us=99.5) for each in ahead.record.measurements)
    anew = dataclasses.replace(ahead, record=dataclasses.replace(ahead.record, measurements=others))
    assert store.add_imported(ImportRequest((anew,)), uid=0) == ImportAnswer(replaced=1)


def test_the_oldest_time_of_all_is_no_later_one(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    (entry,) = exported(there, current(make_request("a")))
    store.add_imported(ImportRequest((dataclasses.replace(entry, measured_at=0.0),)), uid=0)
    assert rows(database, "SELECT DISTINCT measured_at FROM measurement") == [(0.0,)]
    assert store.add_imported(ImportRequest((entry,)), uid=0) == ImportAnswer(replaced=1)


def test_an_export_is_of_one_moment(store: Store, database: Path, make_request: RequestMaker) -> None:
    store.record(make_request("a", median_us=50.0), uid=0)

    def action(connection: sa.Connection) -> list[float | None]:
        found = []
        for median in (60.0, 70.0):
            found.append(connection.scalar(sa.select(sa.func.max(tables.Measurement.median_us))))
            store.record(make_request("a", median_us=median), uid=0)
        return found

    with Catalogue(database) as catalogue:
        assert catalogue.read(action) == [50.0, 50.0]
        assert {each.median_us for each in next(iter(Export(catalogue))).record.measurements} == {70.0}


def test_a_rule_that_rests_on_no_measurement_is_carried_too(
    store: Store, database: Path, there: Path, make_request: RequestMaker
) -> None:
    ruled = current(make_request("a"), measurements=())
    assert store.add_imported(ImportRequest(exported(there, ruled)), uid=0) == ImportAnswer(added=1)
    entry = entry_of(database, ruled)
    assert (entry.decision, entry.cost_us, entry.measured_at) == (ruled.records[0].decision, None, None)
