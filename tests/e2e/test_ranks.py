"""A data-parallel program of two processes, through the hook and with a real daemon: one rank finds out, and all run alike.

Each rank compiles on a core of its own for seconds. That three follow one is tested in `tests/client/decisions/ranks`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import patient
from tests.support.sandbox import RUN_TIMEOUT_S

if TYPE_CHECKING:
    from tests.support.sandbox import Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.daemon]

PROGRAMS = Path(__file__).with_name("programs")
WORLD = 2


def run(sandbox: Sandbox, name: str, **variables: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Run all ranks; return what each has printed, and their summaries."""
    folder = sandbox.home / name
    folder.mkdir()
    environ = patient(sandbox.environment(CUDA_VISIBLE_DEVICES="", **variables))
    command: list[str | Path] = [PROGRAMS / "forked_ranks.py", PROGRAMS / "ranks.py", str(WORLD), folder]
    ended = sandbox.python.run(command, environ, Path.cwd(), RUN_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    printed = [(folder / f"out.{rank}").read_text() for rank in range(WORLD)]
    said = [folder / f"summary.{rank}" for rank in range(WORLD)]
    return printed, [json.loads(each.read_text()) for each in said if each.exists()]


def decisions(summary: dict[str, Any]) -> dict[str, str]:
    return {each["graph"]: each["deployment"] for each in summary["decisions"]}


@pytest.mark.slow
def test_one_rank_asks_the_daemon_for_all_and_losses_are_those_without_us(sandbox: Sandbox) -> None:
    sandbox.start_daemon()
    plain, none = run(sandbox, "plain")
    assert all(each.startswith("step 0: loss ") for each in plain)
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
