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


def run(sandbox: Sandbox, path: str | None = None) -> Outcome:
    """Run the program, with another search path if one is given."""
    path = path or os.environ.get("PYTHONPATH", "")
    outcome = sandbox.run("--brief", CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    assert outcome.code == 0, outcome.stderr
    assert outcome.counts["graphs"] > 0
    return outcome


def assert_known(outcome: Outcome, *, all_of_them: bool) -> None:
    assert outcome.counts["hits"] == (outcome.counts["graphs"] if all_of_them else 0)
    assert outcome.counts["misses"] == (0 if all_of_them else outcome.counts["looked_up"])
    assert outcome.counts["looked_up"] > 0
    assert outcome.counts["measured"] == 0


def test_every_graph_is_explained_and_a_changed_environment_by_the_factor_that_differs(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.start_daemon()
    runs = [run(sandbox), run(sandbox)]

    for number, (outcome, source) in enumerate(zip(runs, ("rule", "cache"), strict=True), start=1):
        text, graphs = explained(sandbox, number)
        assert {graph["graph"] for graph in graphs} == digests(outcome)
        assert sum(graph["ran"]["times"] for graph in graphs) == outcome.counts["graphs"]
        for graph in graphs:
            assert graph["ran"]["source"] == source
            assert graph["entry"]["text"] == graph["ran"]["text"] == "no CUDA device"
            assert graph["nearest"] is None
        *blocks, last = text.strip().split("\n\n")
        assert len(blocks) == len(graphs)
        assert last.startswith("graph break  ")
        assert all("ran as       KERNELS: no CUDA device" in block for block in blocks)

    sandbox.stop_daemon()
    changed = run(sandbox, other_triton(tmp_path))
    text, graphs = explained(sandbox, 3)

    assert changed.counts["hits"] == 0
    assert {graph["graph"] for graph in graphs} == digests(changed) == digests(runs[0])
    for graph in graphs:
        assert graph["entry"]["spooled"]
        (difference,) = graph["nearest"]["differences"]
        assert (difference["factor"], difference["here"]) == ("triton", "9.9")
    assert text.count("differs in   triton ") == text.count(" -> 9.9") == len(graphs)
    assert "results not in the cache yet; take them in with: pygraphd start" in text


def test_what_was_found_without_a_daemon_is_known_with_and_without_one_and_explained_without_one(
    sandbox: Sandbox,
) -> None:
    first = run(sandbox)
    second = run(sandbox)

    text, graphs = explained(sandbox, 2)
    (graph, *_) = digests(second)
    one = sandbox.pygraphd("cache", "explain", graph)
    assert {graph["graph"] for graph in graphs} == digests(second)
    assert all(graph["entry"]["spooled"] for graph in graphs)
    assert text.count("source       looked up in the spool") == len(graphs)
    assert "not known" not in text
    assert (one.returncode, one.stdout.splitlines()[0]) == (0, f"graph        {graph}"), one.stderr

    sandbox.start_daemon()
    beside = run(sandbox)
    sandbox.stop_daemon()
    after = run(sandbox)

    assert_known(first, all_of_them=False)
    assert first.counts["spooled"] == first.counts["graphs"]
    for known in (second, beside, after):
        assert_known(known, all_of_them=True)
    for alone in (first, second, after):
        assert alone.counts["daemon"]["version"] is None
    assert beside.counts["daemon"]["version"] is not None
