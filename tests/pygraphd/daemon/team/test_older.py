"""What was recorded before there was a team: what is published of it, and that it is what would have been published then."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from pygraphd.daemon.team.older import measured_here
from pygraphd.daemon.team.queue import publications
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import ImportRequest, Portable

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
