"""A trace of torch's profiler on a GPU names the compiled graph around each launch, and over the kernels that it launches."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.watched import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CALLS = 60
"""Calls within which both graphs are decided."""
STEPS = 3


class Model(torch.nn.Module):  # type: ignore[misc]  # torch has no types for it
    """Kernels without a copy or a memset, so that a GRAPH is one in any profile, and enough of them that it saves host time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.randn(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (x + layer).softmax(0).softmax(1)
        return x.sum()


def trace_of(step: Any, file: Path) -> list[dict[str, Any]]:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def spans(events: list[dict[str, Any]], category: str) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == category]


@pytest.mark.usefixtures("graphs_win")
def test_a_trace_names_forward_and_backward_over_their_kernels(watched: Watched, tmp_path: Path) -> None:
    model = torch.compile(Model().cuda())
    x = torch.randn(64, 64, device="cuda")

    def step() -> None:
        model(x).backward()

    for _ in range(CALLS):
        step()
    assert watched.deployed() == {"GRAPH": 2}, watched.reasons()

    events = trace_of(step, tmp_path / "trace.json")

    on_host = [name for name, *_ in spans(events, "user_annotation") if name.startswith("pygraph: ")]
    kinds = [re.fullmatch(r"pygraph: (forward|backward) [0-9a-f]{12}", name) for name in on_host]
    assert all(kinds), on_host
    assert sorted(kind[1] for kind in kinds if kind) == ["backward"] * STEPS + ["forward"] * STEPS
    on_gpu = [each for each in spans(events, "gpu_user_annotation") if each[0].startswith("pygraph: ")]
    assert sorted(name for name, *_ in on_gpu) == sorted(on_host)
    kernels = [each for each in spans(events, "kernel") if "triton" in each[0]]
    assert kernels
    for name, begin, end in kernels:
        assert any(first <= begin and end <= last for _, first, last in on_gpu), name


def test_nothing_is_named_without_a_profiler(watched: Watched) -> None:
    """A call leaves the helper only while one runs: after it, as before, the helper serves all calls alone."""
    model = torch.compile(Model().cuda(), mode="reduce-overhead")
    x = torch.randn(64, 64, device="cuda")
    with torch.inference_mode():
        for _ in range(CALLS):
            model(x)
        before = watched.report.summary()["fallbacks"]
        with torch.autograd.profiler.emit_nvtx():
            model(x)
        for _ in range(STEPS):
            model(x)
    assert watched.report.summary()["fallbacks"] == before
