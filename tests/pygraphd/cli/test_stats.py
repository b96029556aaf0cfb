from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pygraphd.cli.stats import Statistics, statistics_text
from pygraphd.daemon.statistics import Counters
from pygraphd.daemon.store import Store
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    import pytest

    from pygraphd.schema.locations import Locations

__all__ = ["locations"]  # a fixture


def test_without_a_daemon_the_file_tells_what_was_counted_ever(
    locations: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pygraphd("stats") == 0
    assert "nothing was counted yet" in capsys.readouterr().out
    assert not locations.database.exists()
    with Store(locations.database) as store:
        store.add_statistics(Counters(lookups=3, graphs=8, hits=6, misses=2, unknown=2, measuring_saved_s=90))
    assert pygraphd("stats") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["hits", "6", "(75.0%)"] in lines
    assert ["never", "recorded", "2"] in lines
    assert ["measuring", "saved", "1m"] in lines
    assert ["recording", "saved", "0.0", "s"] in lines
    assert not [line for line in lines if line[0] == "provisional"]
    assert pygraphd("stats", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["since_start"], told["since_ever"]["hits"]) == (1, None, 6)


def test_zero_begins_anew(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(locations.database) as store:
        store.add_statistics(Counters(lookups=3))
    assert pygraphd("stats", "--zero", "--json") == 0
    assert json.loads(capsys.readouterr().out)["since_ever"]["lookups"] == 0
    with Store(locations.database) as store:
        stored = store.statistics()
    assert stored is not None
    assert stored.counters == Counters()


def test_zero_of_nothing_makes_nothing(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    assert pygraphd("stats", "--zero") == 0
    assert capsys.readouterr().out.startswith("nothing was counted yet: ")
    assert pygraphd("stats", "--zero", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "since_start": None, "since_ever": None}
    assert list(locations.cache.iterdir()) == []


def test_columns_are_those_that_are_known() -> None:
    counts = {**dict.fromkeys(Counters.__slots__, 0), "since": 100.0}
    first, second, *_ = statistics_text(Statistics(counts, counts), now=160.0).splitlines()
    assert first.split() == ["SINCE", "START", "ALL", "TIME"]
    assert second.split() == ["counted", "for", "1m", "1m"]
