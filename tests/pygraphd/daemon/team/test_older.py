"""What is published of the cache, that it is what would have been published at once, and that it is read in pieces."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.team import older as module
from pygraphd.daemon.team.older import LocalCache
from pygraphd.daemon.team.queue import Publication, Unpublished, publications
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import ImportRequest, Portable
from tests.support.forged_database import copy_without_types

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.daemon.store import Store
    from pygraphd.schema.messages import RecordRequest


def _of_today(request: RecordRequest) -> RecordRequest:
    records = [
        dataclasses.replace(each, decision=dataclasses.replace(each.decision, policy=POLICY_VERSION))
        for each in request.records
    ]
    return dataclasses.replace(request, records=tuple(records))


def _pages(cache: LocalCache, part: Unpublished) -> list[list[Publication]]:
    """Return the pages of a part of the cache, up to the last."""
    pages = []
    for _ in range(1000):
        found, place = cache.page(part)
        pages.append(found)
        if place is None:
            return pages
        part = dataclasses.replace(part, place=place)
    raise AssertionError("there is always another page")


def _ids(cache: LocalCache, part: Unpublished) -> list[str]:
    return sorted(each.id for page in _pages(cache, part) for each in page)


def test_what_was_measured_here_has_the_id_that_it_would_have_had(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    requests = [_of_today(make_request(name)) for name in ("a", "b", "c")]
    for time_s, request in enumerate(requests):
        store.record(request, 7, float(time_s))
    store.record(_of_today(make_request("provisional", final=False)), uid=7)
    store.record(make_request("of an older policy"), uid=7)
    elsewhere = _of_today(make_request("imported"))
    imported = Portable(elsewhere.environment, elsewhere.origin, elsewhere.records[0], 1.0)
    store.add_imported(ImportRequest((imported,)), uid=7)

    until = time.time()
    store.record(_of_today(make_request("while there was a team")), uid=7)

    cache = LocalCache(database)

    expected = [publications(each, 7, 1.0)[0].id for each in requests]
    assert _ids(cache, Unpublished(0.0, until)) == sorted(expected)
    assert cache.count(Unpublished(0.0, until)) == 3
    assert _ids(cache, Unpublished(1.0, 2.0)) == sorted(expected[1:])


def test_pages_are_short_and_come_to_each_entry_once(
    store: Store,
    database: Path,
    make_request: Callable[..., RecordRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither what is found in one nor what is looked at is much, whatever is in the cache."""
    monkeypatch.setattr(module, "CHUNK", 2)
    monkeypatch.setattr(module, "SCANNED", 7)
    request = _of_today(make_request(*map(str, range(50))))
    store.record(request, uid=7)
    store.record(make_request(*(f"of an older policy {number}" for number in range(100))), uid=7)

    pages = _pages(LocalCache(database), Unpublished(0.0, time.time()))

    found = [each.id for page in pages for each in page]
    assert sorted(found) == sorted(each.id for each in publications(request, 7, 1.0))
    assert max(map(len, pages)) == 2
    assert len(pages) >= 150 / 7


@pytest.mark.parametrize(
    "forged",
    [
        "graph SET sizes = x'ff'",
        "graph SET sizes = 5",
        "graph SET kind = 1e999",
        "decision SET uid = x'ff'",
        "decision SET id = x'ff'",
        "decision SET id = CAST(x'61ff' AS TEXT)",
    ],
)
def test_a_row_that_is_not_valid_does_not_hide_the_others(
    store: Store, database: Path, tmp_path: Path, make_request: Callable[..., RecordRequest], forged: str
) -> None:
    first, second = (_of_today(make_request(name)) for name in ("a", "b"))
    store.record(first, uid=7)
    store.record(second, uid=7)
    store.close()
    copy = tmp_path / "copy.db"
    copy_without_types(database, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        column = "digest" if forged.startswith("graph") else "graph"
        connection.execute(f"UPDATE {forged} WHERE {column} = ?", (first.records[0].graph.digest,))
        connection.commit()

    found = _ids(LocalCache(copy), Unpublished(0.0, time.time()))
    assert found == [publications(second, 7, 1.0)[0].id]
