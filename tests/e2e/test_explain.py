"""`pygraphd cache explain` on what real programs left: every graph has its reason, and a miss the factor that differs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sandbox import Outcome, Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.daemon, pytest.mark.slow]


def explained(sandbox: Sandbox, number: int) -> tuple[str, list[dict[str, Any]]]:
    """Explain the summary of the program that ran as the `number`th, as text and as JSON."""
    target = str(sandbox.home / f"summary-{number}.json")
    text, value = (
        sandbox.pygraphd("cache", "explain", target),
        sandbox.pygraphd("cache", "explain", target, "--json"),
    )
    assert (text.returncode, value.returncode) == (0, 0), text.stderr + value.stderr
    graphs: list[dict[str, Any]] = json.loads(value.stdout)["graphs"]
    return text.stdout, graphs


def digests(outcome: Outcome) -> set[str]:
    return {decision["graph"] for decision in outcome.counts["decisions"]}


def other_triton(folder: Path) -> str:
    """Return a search path on which another version of Triton is listed; the environment asks for no more than that."""
    listed = folder / "triton-9.9.dist-info"
    listed.mkdir()
    (listed / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.9\n")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def test_every_graph_of_both_runs_is_explained(sandbox: Sandbox) -> None:
    sandbox.start_daemon()
    runs = [sandbox.run(CUDA_VISIBLE_DEVICES=""), sandbox.run(CUDA_VISIBLE_DEVICES="")]

    for number, (outcome, source) in enumerate(zip(runs, ("rule", "cache"), strict=True), start=1):
        text, graphs = explained(sandbox, number)
        assert {graph["graph"] for graph in graphs} == digests(outcome)
        assert sum(graph["ran"]["times"] for graph in graphs) == outcome.counts["graphs"] > 0
        for graph in graphs:
            assert graph["ran"]["source"] == source
            assert graph["entry"]["text"] == graph["ran"]["text"] == "no CUDA device"
            assert graph["nearest"] is None
        *blocks, last = text.strip().split("\n\n")
        assert len(blocks) == len(graphs)
        assert last.startswith("graph break  ")
        assert all("ran as       KERNELS: no CUDA device" in block for block in blocks)


def test_what_is_known_without_a_daemon_is_explained_without_one(sandbox: Sandbox) -> None:
    sandbox.run(CUDA_VISIBLE_DEVICES="")
    again = sandbox.run(CUDA_VISIBLE_DEVICES="")

    text, graphs = explained(sandbox, 2)
    (graph, *_) = digests(again)
    one = sandbox.pygraphd("cache", "explain", graph)

    assert again.counts["hits"] == again.counts["graphs"] > 0
    assert {graph["graph"] for graph in graphs} == digests(again)
    assert all(graph["entry"]["spooled"] for graph in graphs)
    assert text.count("source       looked up in the spool") == len(graphs)
    assert "not known" not in text
    assert (one.returncode, one.stdout.splitlines()[0]) == (0, f"graph        {graph}"), one.stderr


def test_a_changed_environment_is_explained_by_the_factor_that_differs(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.start_daemon()
    known = digests(sandbox.run(CUDA_VISIBLE_DEVICES=""))
    sandbox.stop_daemon()

    changed = sandbox.run(PYTHONPATH=other_triton(tmp_path), CUDA_VISIBLE_DEVICES="")
    text, graphs = explained(sandbox, 2)

    assert changed.counts["hits"] == 0
    assert {graph["graph"] for graph in graphs} == digests(changed) == known
    for graph in graphs:
        assert graph["entry"]["spooled"]
        (difference,) = graph["nearest"]["differences"]
        assert (difference["factor"], difference["here"]) == ("triton", "9.9")
    assert text.count("differs in   triton ") == text.count(" -> 9.9") == len(graphs)
    assert "results not in the cache yet; take them in with: pygraphd start" in text
