from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import row_checks
from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.exporting import Export
from pygraphd.daemon.pruning import PruneRequest
from pygraphd.daemon.rederiving import decision_of
from pygraphd.errors import CommandError, Exit, UsageError
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import entry_id
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import sqlalchemy as sa

    from pygraphd.cli.entries import CachedEntry
    from pygraphd.daemon.rederiving import Row
    from pygraphd.daemon.store import Store
    from pygraphd.schema.messages import Decision, RecordRequest


def listed(
    catalogue: Catalogue, gpu: str = "", graph: str = "", most: int | None = None
) -> list[CachedEntry]:
    return [entry for page in catalogue.pages(gpu, graph, most) for entry in page]


@pytest.fixture
def catalogue(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> Iterator[Catalogue]:
    store.record(make_request("a", median_us=200.0), uid=7)
    store.record(make_request("a", median_us=100.0), uid=7)
    store.record(make_request("b", gpu="NVIDIA A100", final=False), uid=7)
    store.record(make_request("a", gpu="NVIDIA A100"), uid=7)
    with Catalogue(database) as opened:
        yield opened


def test_lists_newest_first_with_the_newest_medians(catalogue: Catalogue) -> None:
    entries = listed(catalogue)
    assert [entry.facts["gpu"] for entry in entries] == ["NVIDIA A100", "NVIDIA A100", "NVIDIA H200"]
    assert entries[2].medians_us == {"KERNELS": 100.0, "GRAPH": 100.0}
    assert [entry.facts["final"] for entry in entries] == [True, False, True]


def test_filters(catalogue: Catalogue, make_request: Callable[..., RecordRequest]) -> None:
    digest = make_request("a").records[0].graph.digest
    assert len(listed(catalogue, gpu="a100")) == 2
    assert len(listed(catalogue, graph=digest[:10].upper())) == 2
    assert len(listed(catalogue, gpu="H200", graph=digest)) == 1
    assert listed(catalogue, gpu="_") == []
    assert listed(catalogue, graph=digest[1:]) == []


def test_shows_one_entry_with_everything(
    catalogue: Catalogue, make_request: Callable[..., RecordRequest]
) -> None:
    request = make_request("a")
    key = entry_id(request.environment.digest(), request.records[0].graph.digest)
    details = catalogue.show(key[:12])
    assert details.entry.facts["id"] == key
    assert details.environment == {"id": request.environment.digest(), **request.environment.factors()}
    assert [row["median_us"] for row in details.measurements] == [100.0, 100.0, 200.0, 200.0]
    assert {row["deployment"] for row in details.measurements} == {Deployment.KERNELS, Deployment.GRAPH}


def test_a_graph_in_one_environment_is_shown_by_its_digest(
    catalogue: Catalogue, make_request: Callable[..., RecordRequest]
) -> None:
    digest = make_request("b").records[0].graph.digest
    assert catalogue.show(digest[:8].upper()).entry.facts["graph"] == digest


def test_an_ambiguous_prefix_lists_the_choices(
    catalogue: Catalogue, make_request: Callable[..., RecordRequest]
) -> None:
    digest = make_request("a").records[0].graph.digest
    with pytest.raises(UsageError, match="begins the id or graph of 2 entries") as caught:
        catalogue.show(digest)
    assert caught.value.exit_code == Exit.USAGE
    assert entry_id(make_request("a").environment.digest(), digest)[:12] in str(caught.value)


def test_no_more_entries_are_counted_than_were_looked_for(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.cli.catalogue._MOST_AMBIGUOUS", 2)

    with pytest.raises(UsageError, match="begins the id or graph of 2 or more entries"):
        catalogue.show("")


@pytest.mark.parametrize("prefix", ["zz", "%", "_" * 3])
def test_an_unknown_prefix_says_where_to_look(catalogue: Catalogue, prefix: str) -> None:
    with pytest.raises(
        UsageError, match=r"no entry has an id or graph that begins so; see: pygraphd cache inspect"
    ):
        catalogue.show(prefix)


def test_a_missing_cache_is_said(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no cache yet"):
        Catalogue(tmp_path / "none.db")


def test_a_damaged_cache_is_said(database: Path) -> None:
    database.write_bytes(b"garbage" * 1000)
    with (
        Catalogue(database) as catalogue,
        pytest.raises(CommandError, match="file is not a database; `pygraphd start`"),
    ):
        listed(catalogue)


def _steps(catalogue: Catalogue, use: Callable[[Catalogue], object]) -> int:
    """Return the steps that SQLite takes for `use`, in hundreds: they grow with the number of rows read."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with catalogue._engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_progress_handler(count, 100)
    use(catalogue)
    return steps


@pytest.mark.parametrize("what", ["show", "show by id", "explain", "inspect --graph", "export --graph"])
def test_one_graph_is_read_by_the_index(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], what: str
) -> None:
    request = make_request("0")
    graph = request.records[0].graph.digest
    uses: dict[str, Callable[[Catalogue], object]] = {
        "show": lambda catalogue: catalogue.show(graph[:16]),
        "show by id": lambda catalogue: catalogue.show(entry_id(request.environment.digest(), graph)[:16]),
        "explain": lambda catalogue: catalogue.of_prefix(graph[:16]),
        "inspect --graph": lambda catalogue: listed(catalogue, graph=graph[:16]),
        "export --graph": lambda catalogue: list(Export(catalogue, graph=graph[:16])),
    }
    steps = []
    for number in (50, 1000):
        store.record(make_request(*map(str, range(number))), uid=0)
        with Catalogue(database) as catalogue:
            steps.append(_steps(catalogue, uses[what]))
    assert steps[1] <= steps[0] + 2


def test_a_listing_is_read_page_by_page(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.cli.catalogue.PAGE_ROWS", 10)
    store.record(make_request(*map(str, range(35))), uid=0)
    with Catalogue(database) as catalogue:
        pages = catalogue.pages()
        first = next(pages)
        store.prune(PruneRequest(gpu="H200"))  # no transaction is open between pages, so it can be written
        assert (len(first), sum(len(page) for page in pages)) == (10, 0)
    store.record(make_request(*map(str, range(35))), uid=0)
    with Catalogue(database) as catalogue:
        assert [len(page) for page in catalogue.pages()] == [10, 10, 10, 5]
        assert len(listed(catalogue, most=12)) == 12


def test_the_newest_are_there_before_the_others_are_looked_for(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million entries, all are sorted only after the first lines have been printed."""
    monkeypatch.setattr("pygraphd.cli.catalogue.PAGE_ROWS", 10)
    store.record(make_request(*map(str, range(35))), uid=0)
    with Catalogue(database) as catalogue:
        asked, places = [], catalogue.places

        def noted(gpu: str, graph: str, *, newest_first: bool, most: int | None) -> Sequence[int]:
            asked.append(most)
            return places(gpu, graph, newest_first=newest_first, most=most)

        monkeypatch.setattr(catalogue, "places", noted)
        pages = catalogue.pages()
        next(pages)
        assert asked == [10]
        assert sum(map(len, pages)) == 25
        assert asked == [10, None]


def test_what_is_decided_during_a_listing_is_in_it_once(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.cli.catalogue.PAGE_ROWS", 10)
    for number in range(35):
        store.record(make_request(str(number)), uid=0)
    with Catalogue(database) as catalogue:
        pages = catalogue.pages()
        ids = [entry.facts["id"] for entry in next(pages)]
        store.record(
            make_request("0", "34", median_us=7.0), uid=0
        )  # of those to come, and of those that came
        ids += [entry.facts["id"] for page in pages for entry in page]
    assert len(ids) == len(set(ids)) == 35


def test_what_many_entries_have_in_common_is_checked_once(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To check it for each takes longer than to read all of them."""
    checked = []

    def noted(row: Row) -> Decision:
        checked.append(row)
        return decision_of(row)

    monkeypatch.setattr(row_checks, "decision_of", noted)
    row_checks._check_decision.cache_clear()
    store.record(make_request(*map(str, range(35))), uid=0)
    with Catalogue(database) as catalogue:
        assert len(listed(catalogue)) == 35
    assert len(checked) == 1


def test_only_pages_with_a_row_that_is_not_valid_are_checked_row_by_row(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, the checks take as long as SQLite takes to find the rows."""
    checked, entry = [], row_checks.entry

    def noted(row: dict[str, Any], medians: dict[str, Any]) -> dict[str, Any]:
        checked.append(row)
        return entry(row, medians)

    monkeypatch.setattr("pygraphd.cli.catalogue.PAGE_ROWS", 10)
    monkeypatch.setattr(row_checks, "entry", noted)
    store.record(make_request(*map(str, range(35))), uid=0)
    with Catalogue(database) as catalogue:
        assert (len(listed(catalogue)), len(checked)) == (35, 0)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE decision SET hits = -1 WHERE rowid = 2")
        connection.commit()
    with Catalogue(database) as catalogue:
        entries = listed(catalogue)
    assert (len({each.facts["id"] for each in entries}), len(checked)) == (34, 5)


def test_text_that_is_not_utf_8_hides_no_entry(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    store.record(make_request(*map(str, range(3))), uid=0)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE decision SET detail = CAST(x'61ff' AS TEXT) WHERE rowid = 2")
        connection.commit()
    with Catalogue(database) as catalogue:
        details = [entry.facts["detail"] for entry in listed(catalogue)]
    assert (len(details), details[1]) == (3, "a\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("column", "value"), [("policy", 1.0), ("final", 1.0), ("partition", 0.0), ("uid", 7.0)]
)
def test_a_value_of_another_type_is_not_taken_for_one_that_was_checked(
    catalogue: Catalogue, column: str, value: float
) -> None:
    """Though it is equal to it, as 1.0 is to 1."""
    facts = next(entry.facts for entry in listed(catalogue) if entry.facts["final"])
    row = {**facts, "sizes": "", "final": 1, "policy": 1}
    assert row_checks.entry(dict(row), {})["policy"] == 1
    with pytest.raises(InvalidMessageError):
        row_checks.entry({**row, column: value}, {})


def test_an_export_has_one_page_in_memory(
    store: Store, database: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.cli.exporting.PAGE_ROWS", 10)
    store.record(make_request(*map(str, range(35))), uid=0)
    with Catalogue(database) as catalogue:
        reads, read = [], catalogue.read

        def counted(action: Callable[[sa.Connection], object]) -> object:
            reads.append(action)
            return read(action)

        monkeypatch.setattr(catalogue, "read", counted)
        entries = iter(Export(catalogue))
        next(entries)
        assert len(reads) == 2  # the order, and one page
        assert len(list(entries)) == 34
        assert len(reads) == 5
