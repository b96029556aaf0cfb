"""A data-parallel program of four processes, through the hook and with a real daemon: one rank finds out, and all run alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import patient

if TYPE_CHECKING:
    from tests.e2e.conftest import Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.daemon]

PROGRAM = Path(__file__).with_name("programs") / "ranks.py"
WORLD = 4


def run(sandbox: Sandbox, name: str, **variables: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Run all ranks; return what each has printed, and their summaries."""
    folder = sandbox.home / name
    folder.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(WORLD), folder / "meeting"],
            env=patient(
                sandbox.environment(
                    PYGRAPH_SUMMARY=str(folder / f"summary.{rank}"),
                    CUDA_VISIBLE_DEVICES="",
                    OMP_NUM_THREADS="1",
                    **variables,
                )
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        ended = [each.communicate(timeout=600) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0] * WORLD, ended
    said = [folder / f"summary.{rank}" for rank in range(WORLD)]
    return [out for out, _ in ended], [json.loads(each.read_text()) for each in said if each.exists()]


def decisions(summary: dict[str, Any]) -> dict[str, str]:
    return {each["graph"]: each["deployment"] for each in summary["decisions"]}


@pytest.mark.slow
def test_one_rank_asks_the_daemon_for_all_and_losses_are_those_without_us(sandbox: Sandbox) -> None:
    sandbox.start_daemon()
    plain, none = run(sandbox, "plain")
    assert none == []

    for name in ("cold", "warm"):
        printed, summaries = run(sandbox, name, PYGRAPH="1")

        assert printed == plain
        graphs = summaries[0]["graphs"]
        assert [each["graphs"] for each in summaries] == [graphs] * WORLD
        assert graphs >= 2  # a forward and its backward
        assert sum(each["led"] for each in summaries) == graphs
        assert sum(each["followed"] for each in summaries) == (WORLD - 1) * graphs
        known = graphs if name == "warm" else 0
        assert sum(each["looked_up"] for each in summaries) == graphs
        assert sum(each["hits"] for each in summaries) == known
        assert sum(each["recorded"] for each in summaries) == graphs - known
        assert len({json.dumps(decisions(each), sort_keys=True) for each in summaries}) == 1
        assert all(each["failures"] == {} for each in summaries)
