"""A second program gets all sizes of a graph from the daemon by one request, the most used first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.decisions.decision_service import DecisionService
from pygraphd.client.decisions.trust import TrustPolicy
from pygraphd.schema.messages import SIZES_PATH, Origin, encode
from pygraphd.schema.portable import Portable
from tests.support.shipped_rows import written
from tests.support.sized_records import HERE, WHOLE, asked, first_sizes, sized_record, sized_request

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon


def program(home: Home) -> tuple[DecisionService, Report]:
    """Return the decisions of a new program, and its report."""
    cache = Cache(home.locations, "here", report := Report())
    return DecisionService(cache, TrustPolicy("here"), report), report


def stats(home: Home) -> dict[str, Any]:
    return home.ask("GET", "/v1/stats")[1]


@pytest.mark.slow
def test_a_second_program_gets_all_sizes_in_one_request_the_most_used_first(home: Home) -> None:
    home.start()
    first, _ = program(home)
    for size in range(1, 41):
        first.cache.record(HERE, sized_request(size).records)
    for size in (30, 20, 30):
        first.look_up([WHOLE.at((size,))], HERE)
    home.wait_until(lambda: first_sizes(first.cache.sizes(HERE, WHOLE.digest, 2)) == [30, 20])
    before = stats(home)

    second, report = program(home)
    found = second.look_up_sizes(WHOLE, HERE, 64)

    assert [*found] == [(size,) for size in (30, 20, *(n for n in range(1, 41) if n not in {20, 30}))]
    after = stats(home)
    assert (after["lookups"] - before["lookups"], after["hits"] - before["hits"]) == (1, 0)
    for size in (7, 9):
        second.use(WHOLE.at((size,)), HERE, found[size,])
    assert stats(home)["hits"] == before["hits"]
    second.close()
    assert stats(home)["hits"] - before["hits"] == 2
    assert report.failures == {}
    third, _ = program(home)
    home.wait_until(lambda: {(7,), (9,)} <= third.look_up_sizes(WHOLE, HERE, 4).keys())


def test_shipped_sizes_are_not_listed_and_older_clients_are_told_to_look_them_up(
    home: Home, tmp_path: Path
) -> None:
    written(tmp_path / "exports", Portable(HERE, Origin("lab", "0.1.0"), sized_record(16), 1e9))
    home.variables["PYGRAPHD_SHIPPED"] = str(tmp_path / "exports")
    home.start()
    home.wait_until(lambda: stats(home)["shipped"] == 1)
    cache = Cache(home.locations, "here", Report())
    cache.record(HERE, sized_request(8).records)

    _, answer = home.ask("POST", SIZES_PATH, encode(asked()))

    assert ([each["sizes"] for each in answer["entries"]], answer["complete"]) == ([[8]], False)
    found = cache.lookup(HERE, [WHOLE.at((size,)).digest for size in (8, 16)])
    assert [each.host for each in found.values()] == ["here", "shipped:lab"]


def test_sizes_in_the_spool_are_among_them(home: Home) -> None:
    home.start()
    home.put_in_spool("1.json", encode(sized_request(8, 16)))

    assert first_sizes(Cache(home.locations, "here", Report()).sizes(HERE, WHOLE.digest, 64)) == [8, 16]


@pytest.mark.parametrize(
    "changes", [{"most": 0}, {"most": 1025}, {"most": "64"}, {"graph": "x"}, {"graph": None}], ids=str
)
def test_a_bad_request_is_refused(shared_home: Home, changes: dict[str, object]) -> None:
    body = {**json.loads(encode(asked())), **changes}

    status, answer = shared_home.ask("POST", SIZES_PATH, json.dumps(body).encode())

    assert (status, next(iter(changes)) in answer["error"]) == (400, True)


@pytest.mark.slow
def test_sizes_that_were_carried_elsewhere_are_found_by_their_graph(home: Home, tmp_path: Path) -> None:
    home.start()
    cache = Cache(home.locations, "here", Report())
    cache.record(HERE, sized_request(8, 16).records)
    for words in (("export", str(tmp_path / "known.jsonl")), ("clear", "--yes")):
        assert home.pygraphd("cache", *words).returncode == 0
    assert cache.sizes(HERE, WHOLE.digest, 64) == []

    assert home.pygraphd("cache", "import", str(tmp_path / "known.jsonl")).returncode == 0

    assert sorted(first_sizes(cache.sizes(HERE, WHOLE.digest, 64))) == [8, 16]
