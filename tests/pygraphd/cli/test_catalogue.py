from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.cli.catalogue import Catalogue
from pygraphd.errors import CommandError, Exit, UsageError
from pygraphd.schema.keys import entry_id
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pygraphd.daemon.store import Store
    from pygraphd.schema.messages import RecordRequest


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
    entries = catalogue.entries()
    assert [entry.facts["gpu"] for entry in entries] == ["NVIDIA A100", "NVIDIA A100", "NVIDIA H200"]
    assert entries[2].medians_us == {"KERNELS": 100.0, "GRAPH": 100.0}
    assert [entry.facts["final"] for entry in entries] == [True, False, True]


def test_filters(catalogue: Catalogue, make_request: Callable[..., RecordRequest]) -> None:
    digest = make_request("a").records[0].graph.digest
    assert len(catalogue.entries(gpu="a100")) == 2
    assert len(catalogue.entries(graph=digest[:10].upper())) == 2
    assert len(catalogue.entries(gpu="H200", graph=digest)) == 1
    assert catalogue.entries(gpu="_") == []
    assert catalogue.entries(graph=digest[1:]) == []


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
        catalogue.entries()
