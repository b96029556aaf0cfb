"""What the rules say of a graph is kept with what is compiled of it, and with nothing else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def told_of(counted: dict[str, int]) -> dict[str, Any]:
    """Return the summary of a process that runs a graph with which this was counted."""
    from pygraphd.client.common.report import Report
    from pygraphd.client.placement import provenance

    report = Report()
    provenance.report_results(SimpleNamespace(counter_deltas=counted), report)
    return report.summary()


def test_what_is_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    from pygraphd.client.placement import provenance
    from pygraphd.client.placement.fx_utils import PassResult

    counted = Counter[str]()
    monkeypatch.setitem(counters, "inductor", counted)
    left = ("because: of (model.py:1)", "because: of (model.py:1)", "placed")
    provenance.save(provenance.KNOWN, PassResult(3, left))
    provenance.save(provenance.INPUTS, PassResult(0, ()))
    assert len(counted) == 3  # nothing for what did not happen

    summary = told_of(counted)

    assert [summary[name] for name in provenance.COUNTS] == [3, 0]
    assert summary["left_on_cpu"] == {"because: of (model.py:1)": 2, "placed": 1}


def test_what_others_count_is_theirs() -> None:
    theirs = {"pattern_matcher_count": 2, "placed": 5, "left_on_cpu: why": 1, "pygraph measured": 7}

    summary = told_of(theirs)

    assert (summary["placed"], summary["measured"], summary["left_on_cpu"]) == (0, 0, {})


def test_the_module_of_a_graph_is_the_innermost_with_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch._dynamo.utils import counters

    from pygraphd.client.placement import provenance

    counted = Counter[str]()
    monkeypatch.setitem(counters, "inductor", counted)
    graph = torch.fx.Graph()
    for number, path in enumerate(("layers.1.fc", None, "layers.1", "layers.12")):
        stack = path and {f"L['self'].{part}": (f"L['self'].{part}", object) for part in ("layers", path)}
        name = "nn_module_stack" if number % 2 else "fwd_nn_module_stack"
        graph.placeholder(f"of_{number}").meta[name] = stack
    provenance.save_module(graph)

    assert provenance.module_of(SimpleNamespace(counter_deltas=counted)) == "L['self']/layers"
    assert provenance.module_of(SimpleNamespace(counter_deltas={})) == ""
