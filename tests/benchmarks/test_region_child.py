"""What a process of `regions` says, with the device's clocks and memory emulated: that it can be written, and of what."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import region_child
from benchmarks.region_table import GRAPH
from pygraphd.client.analysis.graph_facts import facts_of

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import CompiledFacts

pytestmark = pytest.mark.torch


class Event:
    """30 ms after any other."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, _other: Event) -> float:
        return 30.0


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what a CPU has no such thing of do nothing."""
    nothing: dict[Any, tuple[str, ...]] = {
        torch.cuda: ("synchronize", "_sleep", "reset_peak_memory_stats"),
        region_child: ("wake", "have_helper"),
    }
    for module, names in nothing.items():
        for name in names:
            monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(region_child, "find_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(region_child, "reserved_mb", lambda _: 2.0)


@pytest.mark.usefixtures("emulated")
def test_what_was_measured_can_be_written(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    torch._dynamo.reset()

    code = region_child.main(["three-ops", "kernels", str(answer)])

    found = json.loads(answer.read_text())
    assert code == 0
    assert found["gpu_mhz"] == {"median": 2000.0, "mad": 0.0, "n": region_child.STEPS // 2}
    assert found["reserved_mb"] == found["first_steps_reserved_mb"] == 2.0
    assert found["environment"]["torch"] == torch.__version__


@pytest.mark.slow
def test_graphs_are_told_what_is_saved_for_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[frozenset[int]] = []

    def noted(compiled: CompiledFacts) -> GraphFacts | None:
        told.append(compiled.saved)
        return facts_of(compiled)

    monkeypatch.setattr(region_child, "facts_of", noted)
    regions = region_child.Regions(GRAPH)
    torch._dynamo.reset()
    undo = regions.install()
    try:
        with torch._inductor.utils.fresh_inductor_cache():
            torch.compile(lambda x: x.sin().exp() * x)(torch.ones(8, requires_grad=True)).sum().backward()
    finally:
        undo()

    assert len(told) == 2
    assert told[0]


def test_the_clock_is_how_many_cycles_a_microsecond_has() -> None:
    found = region_child.clock_mhz([30.0, 30.0, 40.0])

    assert found == {"median": 2000.0, "mad": 0.0, "n": 3}
    assert region_child.clock_mhz([]) is None
