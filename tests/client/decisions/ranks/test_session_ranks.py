"""Four processes of a gloo group run every graph alike, and their reports say how that came about."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.schema.reasons import ReasonCode
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.daemon, pytest.mark.slow]

ROOT = Path(__file__).parents[4]
RANKS = "import runpy; runpy.run_module('tests.support.programs.ranks', run_name='__main__')"
RECORDED = {"KERNELS": 0, "GRAPH": 2}
KERNELS = {"KERNELS": 2, "GRAPH": 0}
FASTER = {ReasonCode.SAVES_HOST_TIME.text: 2}
Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Path:
    """Return where four ranks, which have run, left what they saw."""
    made = tmp_path_factory.mktemp("ranks")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYGRAPH")}
    environ = {**clean, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = warm_python.run(["-c", RANKS, str(free_port()), made], environ, ROOT, 600)
    assert ended.returncode == 0, ended.stderr
    return made


@pytest.fixture
def read(folder: Path) -> Callable[..., list[Outcome]]:
    """Return what reads the outcomes of a case, in the order of the ranks."""

    def outcomes(case: str, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> list[Outcome]:
        return [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in ranks]

    return outcomes


def column(outcomes: list[Outcome], name: str) -> list[Any]:
    return [outcome[name] for outcome in outcomes]


def test_a_hit_on_the_rank_that_asks_first_is_everybodys(read: Callable[..., list[Outcome]]) -> None:
    ranks = read("known_to_leader")

    assert column(ranks, "first") == column(ranks, "last") == ["relocated"] * 4
    assert column(ranks, "deployed") == [RECORDED] * 4
    assert column(ranks, "reasons") == [FASTER] * 4
    assert column(ranks, "led") == column(ranks, "hits") == [0, 0, 2, 0]
    assert column(ranks, "followed") == [2, 2, 0, 2]
    assert column(ranks, "measured") == [0] * 4


def test_a_hit_on_one_of_the_other_ranks_does_not_set_it_apart(read: Callable[..., list[Outcome]]) -> None:
    ranks = read("known_to_another")

    assert column(ranks, "last") == ["kernels"] * 4
    assert column(ranks, "deployed") == [KERNELS] * 4
    assert column(ranks, "reasons") == [{ReasonCode.LONGER_ON_GPU.text: 2}] * 4
    assert column(ranks, "looked_up") == column(ranks, "measured") == [2, 0, 0, 0]


def test_what_nobody_knows_one_rank_measures(read: Callable[..., list[Outcome]]) -> None:
    ranks = read("unknown")

    assert column(ranks, "last") == ["relocated"] * 4
    assert column(ranks, "deployed") == [RECORDED] * 4
    assert sorted(column(ranks, "led")) == sorted(column(ranks, "measured")) == [0, 0, 0, 2]
    assert column(ranks, "failures").count({}) == 3  # the one that leads has looked for a daemon


def test_a_daemon_that_dies_between_two_ranks_questions_sets_nobody_apart(
    read: Callable[..., list[Outcome]],
) -> None:
    ranks = read("daemon")

    assert column(ranks, "last") == ["relocated"] * 4
    assert column(ranks, "deployed") == [{**RECORDED, "GRAPH": 4}] * 4
    assert column(ranks, "led") == [2, 2, 0, 0]
    assert column(ranks, "hits") == [2, 0, 0, 0]
    assert column(ranks, "measured") == [0, 2, 0, 0]
    assert [set(failures) for failures in column(ranks, "failures")] == [
        set(),
        {"daemon: no daemon"},
        set(),
        set(),
    ]


def test_a_late_rank_runs_what_was_decided_without_it(read: Callable[..., list[Outcome]]) -> None:
    ranks = read("late_rank")

    assert column(ranks, "last") == ["relocated"] * 4
    assert column(ranks, "deployed") == [RECORDED] * 4
    assert ranks[3]["first"] == "relocated"
    assert column(ranks, "measured") == [2, 0, 0, 0]


def test_for_a_leader_that_takes_too_long_all_run_kernels(read: Callable[..., list[Outcome]]) -> None:
    ranks = read("late_leader")

    assert column(ranks, "last") == ["kernels"] * 4
    assert column(ranks, "deployed") == [KERNELS] * 4
    assert column(ranks, "reasons") == [{"ranks: no decision within 0.3 s": 2}] * 4
    assert column(ranks, "measured") == [2, 0, 0, 0]


def test_where_the_store_hangs_each_rank_runs_kernels_and_says_so(read: Callable[..., list[Outcome]]) -> None:
    ranks = read("store_hangs", (1, 2, 3))

    assert column(ranks, "last") == ["kernels"] * 3
    assert column(ranks, "deployed") == [KERNELS] * 3
    # They go on waiting for it until the program ends.
    assert column(ranks, "reasons") == [{ReasonCode.RANKS_UNDECIDED.text: 2}] * 3
    assert [set(each["failures"]) for each in ranks] == [{"ranks: no answer in time"}] * 3


def test_where_the_store_is_gone_each_rank_runs_kernels_and_says_so(
    read: Callable[..., list[Outcome]],
) -> None:
    ranks = read("store_goes", (1, 2, 3))

    assert column(ranks, "last") == ["kernels"] * 3
    assert column(ranks, "deployed") == [KERNELS] * 3
    # Rank 1 has measured, and the others wait for what it cannot tell them.
    reasons = ReasonCode.RANKS_UNREACHABLE, ReasonCode.RANKS_UNDECIDED, ReasonCode.RANKS_UNDECIDED
    assert column(ranks, "reasons") == [{each.text: 2} for each in reasons]
    assert all("ranks: DistNetworkError" in each["failures"] for each in ranks)
