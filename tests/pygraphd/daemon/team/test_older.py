"""What was recorded before there was a team: what is published of it, and that it is what would have been published then."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.team.older import measured_here
from pygraphd.daemon.team.queue import publications
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


def test_the_newest_that_was_measured_here_has_the_id_that_it_would_have_had(
    store: Store, database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    requests = [_of_today(make_request(name)) for name in ("a", "b", "c")]
    for request in requests:
        store.record(request, uid=7)
    store.record(_of_today(make_request("provisional", final=False)), uid=7)
    store.record(make_request("of an older policy"), uid=7)
    elsewhere = _of_today(make_request("imported"))
    imported = Portable(elsewhere.environment, elsewhere.origin, elsewhere.records[0], 1.0)
    store.add_imported(ImportRequest((imported,)), uid=7)

    until = time.time()
    store.record(_of_today(make_request("while there was a team")), uid=7)

    found = [each for some in measured_here(database, until) for each in some]

    assert [each.id for each in found] == [publications(each, 7, 1.0)[0].id for each in requests]
    assert [each.id for some in measured_here(database, until, most=2) for each in some] == [
        each.id for each in found[1:]
    ]


@pytest.mark.parametrize(
    "forged",
    ["graph SET sizes = x'ff'", "graph SET sizes = 5", "graph SET kind = 1e999", "decision SET uid = x'ff'"],
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

    found = [each for some in measured_here(copy, time.time()) for each in some]
    assert [each.id for each in found] == [publications(second, 7, 1.0)[0].id]
