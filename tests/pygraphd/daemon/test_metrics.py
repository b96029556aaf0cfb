from __future__ import annotations

import re

from pygraphd.daemon.metrics import State, metrics_text
from pygraphd.daemon.statistics import Counters
from pygraphd.daemon.team.state import TeamState

SAMPLE = re.compile(r'pygraphd_[a-z_]+(\{[a-z]+="[^"]*"\})? [0-9.e+-]+')


def test_each_metric_has_help_and_type_before_its_samples() -> None:
    counters = Counters(lookups=3, unknown=2, provisional=1, measuring_saved_s=1.5)
    team = TeamState("postgresql+psycopg://me:***@h/team", answered_at=1.8e9, queued=7, unpublished=9)
    text = metrics_text(State("0.1.0", 1.8e9, 5, 4096, 0, counters, team))
    assert "pygraphd_team_reached 1\n" in text
    assert "pygraphd_team_queued 7\n" in text
    assert "pygraphd_team_unpublished 9\n" in text
    assert text.endswith("\n")
    described: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            described.append(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[2:] in ([described[-1], "counter"], [described[-1], "gauge"])
            assert line.endswith("counter") == described[-1].endswith("_total")
        else:
            assert SAMPLE.fullmatch(line), line
            assert re.split("[ {]", line)[0] == described[-1]
    assert len(described) == len(set(described))
    assert "pygraphd_lookups_total 3\n" in text
    assert 'pygraphd_misses_total{reason="unknown"} 2\n' in text
    assert 'pygraphd_saved_seconds_total{by="measuring"} 1.5\n' in text
    assert "pygraphd_entries 5\n" in text


def test_what_cannot_be_read_is_left_out() -> None:
    text = metrics_text(State("0.1.0", 1.8e9, None, None, 1, Counters()))
    assert "pygraphd_entries" not in text
    assert "pygraphd_database_bytes" not in text
    assert "pygraphd_problems 1\n" in text
    assert "pygraphd_team" not in text
