"""The client's view of the sizes that a cache knows: one request, or the files."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions.bundle import Bundle
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.decisions.decision_service import DecisionService
from pygraphd.client.decisions.trust import Trust, TrustPolicy
from pygraphd.daemon.store import Store
from pygraphd.schema import bundle, messages, shipped
from pygraphd.schema.keys import entry_id
from pygraphd.schema.messages import MAX_REQUEST_GRAPHS, Origin, SizedEntry, SizesAnswer
from pygraphd.schema.portable import Portable
from tests.support.answering import Answering
from tests.support.cache_case import places
from tests.support.shipped_rows import written
from tests.support.sized_records import HERE, WHOLE, first_sizes, sized_record, sized_request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations

__all__ = ["places"]  # a fixture


def digest(size: int) -> str:
    return WHOLE.at((size,)).digest


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def answer(*sizes: int, whole: str = WHOLE.digest, environment: str = HERE.digest()) -> bytes:
    graph = dataclasses.replace(WHOLE, digest=whole)
    each = [(size, sized_record(size, whole=graph).entry(0, "here", 1e9)) for size in sizes]
    found = tuple(SizedEntry((size,), entry) for size, entry in each)
    return http(messages.encode(SizesAnswer(environment, "9.9", whole, found)))


def sizes_of(cache: Cache, most: int = 64) -> list[SizedEntry]:
    return cache.sizes(HERE, WHOLE.digest, most)


# --- from a daemon ---


def test_one_request_brings_all_sizes_in_the_daemons_order(places: Locations) -> None:
    with Answering(places.socket, lambda _: answer(24, 8, 16)) as peer:
        found = sizes_of(Cache(places, "host", report := Report()))

    (request,) = peer.requests
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v3/sizes ")
    assert json.loads(body) == {"environment": HERE.digest(), "graph": WHOLE.digest, "most": 64}
    assert first_sizes(found) == [24, 8, 16]
    assert (report.failures, report.lookup_ms > 0) == ({}, True)


@pytest.mark.parametrize("most", [MAX_REQUEST_GRAPHS, 10_000])
def test_no_more_is_asked_for_than_an_answer_may_have(places: Locations, most: int) -> None:
    whole = answer(*range(MAX_REQUEST_GRAPHS))
    with Answering(places.socket, lambda _: whole) as peer:
        found = sizes_of(Cache(places, "host", Report()), most)

    assert b'"most":1024' in peer.requests[0]
    assert len(found) == MAX_REQUEST_GRAPHS


def test_a_daemon_that_does_not_know_the_request_lists_nothing_and_no_file_is_read(places: Locations) -> None:
    with Store(places.database) as store:
        store.record(sized_request(8), uid=0)
    with Answering(places.socket, lambda _: http(b"", "404 Not Found")) as peer:
        cache = Cache(places, "host", report := Report())
        found = [sizes_of(cache) for _ in range(3)]

    assert found == [[]] * 3
    assert len(peer.requests) == 1
    assert report.failures == {"daemon: of another version; run: pygraphd restart": 1}


STRANGE: dict[str, Callable[[], bytes]] = {
    "no JSON": lambda: http(b"{"),
    "another type": lambda: http(b"[1]"),
    "another graph": lambda: answer(8, whole="0" * 64),
    "another environment": lambda: answer(8, environment="0" * 64),
    "sizes of another graph": lambda: http(answer(8).partition(b"\r\n\r\n")[2].replace(b"[8]", b"[9]")),
    "no sizes": lambda: http(answer(8).partition(b"\r\n\r\n")[2].replace(b"[8]", b"[]")),
    "text for a size": lambda: http(answer(8).partition(b"\r\n\r\n")[2].replace(b"[8]", b'["8"]')),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_answer_that_is_not_valid_is_a_failure_and_the_files_are_read(
    places: Locations, name: str
) -> None:
    with Store(places.database) as store:
        store.record(sized_request(16), uid=0)
    with Answering(places.socket, lambda _: STRANGE[name]()):
        found = sizes_of(Cache(places, "host", report := Report()))

    assert first_sizes(found) == [16]
    assert report.failures.total() == 1


# --- without a daemon ---


def test_sizes_of_database_and_spool_are_listed_in_this_order(places: Locations) -> None:
    with Store(places.database) as store:
        store.record(sized_request(8), uid=0)
        store.record(sized_request(16), uid=0)
        store.add_hits({(HERE.digest(), digest(16)): (1, 1.0)})
    for size in (24, 40):
        Cache(places, "host", Report()).record(HERE, [sized_record(size)])
    Cache(places, "host", Report()).record(HERE, [sized_record(48, final=False)])

    found = sizes_of(Cache(places, "host", report := Report()))

    assert first_sizes(found) == [16, 8, 24, 40]
    assert first_sizes(sizes_of(Cache(places, "host", Report()), 3)) == [16, 8, 24]
    assert set(report.failures) == {"daemon: no daemon"}


def test_a_process_without_a_daemon_knows_the_sizes_that_it_found_itself(places: Locations) -> None:
    cache = Cache(places, "host", Report())
    assert sizes_of(cache) == []
    cache.record(HERE, [sized_record(8)])

    assert first_sizes(sizes_of(cache)) == [8]


# --- bundles ---


@pytest.fixture
def bundled(places: Locations, tmp_path: Path) -> Cache:
    """A cache with a bundle in which are 8 and 16."""
    folder = tmp_path / "shared"
    rows = [Portable(HERE, Origin("there", "0.1.0"), sized_record(size), 1e9) for size in (8, 16)]
    known = {entry_id(*row.key): row for row in rows}
    bundle.write(folder, known.keys(), set(), lambda keys: {key: known[key] for key in keys})
    cache = Cache(places, "host", report := Report())
    cache.bundle = Bundle(places, report, folder)
    return cache


def test_sizes_of_a_bundle_are_not_listed_and_are_found_when_they_are_looked_up(
    places: Locations, bundled: Cache
) -> None:
    with Store(places.database) as store:
        store.record(sized_request(8, 24), uid=0)

    assert first_sizes(sizes_of(bundled)) == [8, 24]
    found = bundled.lookup(HERE, [digest(size) for size in (8, 16, 32)])
    assert {graph: entry.host for graph, entry in found.items()} == {
        digest(8): "here",
        digest(16): "bundle:there",
    }


def test_shipped_sizes_are_not_listed_and_a_bundle_ranks_above_them_in_a_lookup(
    bundled: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Origin("lab", "0.1.0")
    written(tmp_path / "lab", *(Portable(HERE, lab, sized_record(size), 1e9) for size in (8, 32)))
    monkeypatch.setenv(shipped.VARIABLE, str(tmp_path / "lab"))

    assert sizes_of(bundled) == []
    found = bundled.lookup(HERE, [digest(8), digest(32)])
    assert {graph: entry.host for graph, entry in found.items()} == {
        digest(8): "bundle:there",
        digest(32): "shipped:lab",
    }


def test_shipped_sizes_in_the_answer_of_an_older_daemon_are_left_out(places: Locations) -> None:
    entries = [
        SizedEntry((size,), sized_record(size).entry(0, host, 1e9))
        for size, host in ((8, "shipped:lab"), (16, "here"))
    ]
    body = messages.encode(SizesAnswer(HERE.digest(), "9.9", WHOLE.digest, tuple(entries)))
    with Answering(places.socket, lambda _: http(body)):
        assert first_sizes(sizes_of(Cache(places, "host", Report()))) == [16]


# --- the decisions of a process ---


def test_sizes_that_are_not_believed_are_not_known_and_used_ones_are_told_of_later(places: Locations) -> None:
    with Answering(places.socket, lambda _: answer(8, 16)) as peer:
        report = Report()
        cache = Cache(places, "here", report)
        strict = DecisionService(cache, TrustPolicy("elsewhere", Trust.LOCAL), report)
        decisions = DecisionService(cache, TrustPolicy("here", Trust.VALIDATE), report)
        assert strict.look_up_sizes(WHOLE, HERE, 64) == {}
        found = decisions.look_up_sizes(WHOLE, HERE, 64)
        assert [*found] == [(8,), (16,)]

        decisions.use(WHOLE.at((16,)), HERE, found[16,])
        assert len(peer.requests) == 2  # those for the sizes
        assert (report.counts["looked_up"], report.counts["hits"]) == (1, 1)
        decisions.close()

    (told,) = peer.requests[2:]
    assert told.startswith(b"POST /v3/lookup ")
    assert json.loads(told.partition(b"\r\n\r\n")[2])["graphs"] == [digest(16)]
