"""A real daemon answers with shipped decisions, counts them, and goes on without those that it cannot read."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.schema import shipped
from pygraphd.schema.messages import LookupRequest, Origin, RecordRequest, encode
from tests.support.shipped_rows import FASTER, H100, KERNELS, row, written

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon

ROWS = [row(name, KERNELS, FASTER) for name in ("a", "b", "c")]
LOOKUP = encode(LookupRequest(H100.digest(), tuple(each.record.graph.digest for each in ROWS)))


def stats(home: Home) -> dict[str, Any]:
    return home.ask("GET", "/v1/stats")[1]


def hosts(home: Home) -> list[str]:
    """Return the hosts of the answers to one lookup."""
    status, answer = home.ask("POST", "/v3/lookup", LOOKUP)
    assert status == 200
    return sorted(each["host"] for each in answer["entries"])


def test_they_rank_below_what_was_found_out_here_and_are_counted(home: Home, tmp_path: Path) -> None:
    written(tmp_path / "exports", *ROWS[:2], row("c", KERNELS, FASTER, gpu="NVIDIA H200"))
    home.variables["PYGRAPHD_SHIPPED"] = str(tmp_path / "exports")
    home.start()
    home.wait_until(lambda: stats(home)["shipped"] == 3)
    before = hosts(home)
    request = RecordRequest(H100, Origin("here", "0.1.0"), (ROWS[0].record,))
    assert home.ask("POST", "/v3/record", encode(request))[0] == 200
    after = hosts(home)

    counted = stats(home)

    assert (before, after) == (["shipped:lab"] * 2, ["here", "shipped:lab"])
    assert (counted["hits"], counted["shipped_hits"], counted["misses"]) == (4, 3, 2)
    assert (counted["other_environment"], counted["entries"], counted["problems"]) == (2, 1, [])
    assert counted["measuring_saved_s"] == pytest.approx(3 * 8 * 70e-6)


def test_the_packages_own_are_answered(home: Home) -> None:
    """Each decision in the files of the package is found by its own key, and the daemon says so."""
    packaged = sorted(
        shipped.load(shipped.folder(shipped.PACKAGE)).known.values(), key=lambda each: each.row.key
    )
    home.variables["PYGRAPHD_SHIPPED"] = shipped.PACKAGE
    home.start()
    home.wait_until(lambda: stats(home)["shipped"] == len(packaged))

    for same, known in itertools.groupby(packaged, key=lambda each: each.row.environment):
        records = {each.row.record.graph.digest: each.row.record for each in known}
        status, answer = home.ask("POST", "/v3/lookup", encode(LookupRequest(same.digest(), tuple(records))))
        found = {each["graph"]: each for each in answer["entries"]}
        assert status == 200
        assert {digest: each["decision"]["deployment"] for digest, each in found.items()} == {
            digest: record.decision.deployment.value for digest, record in records.items()
        }
        assert {each["host"] for each in found.values()} == {"shipped:pygraphd"}
    assert stats(home)["shipped_hits"] == len(packaged) > 300


def test_a_file_that_is_refused_is_a_problem_until_it_is_mended(home: Home, tmp_path: Path) -> None:
    file = written(tmp_path / "exports", *ROWS)
    sound = file.read_bytes()
    file.write_bytes(sound[:-1])
    home.variables["PYGRAPHD_SHIPPED"] = str(tmp_path / "exports")
    pid = home.start()
    home.wait_until(lambda: stats(home)["problems"] != [])

    assert hosts(home) == []
    (problem,) = stats(home)["problems"]
    assert "too early; none of its decisions are used" in problem
    file.write_bytes(sound)
    os.kill(pid, signal.SIGHUP)
    home.wait_until(lambda: stats(home)["shipped"] == 3)
    assert (hosts(home), stats(home)["problems"]) == (["shipped:lab"] * 3, [])
