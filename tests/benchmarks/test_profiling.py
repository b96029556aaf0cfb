from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.coverage import count
from benchmarks.profiling import profile_step, trace_step
from benchmarks.step import Step
from benchmarks.timing import Stopwatch
from benchmarks.variants import Compile
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.case import Case

if TYPE_CHECKING:
    from benchmarks.workloads.case import Inputs, Model

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def watch(device: torch.device) -> Stopwatch:
    case = WORKLOADS["three-ops"].build(CPU)

    def draw() -> Inputs:
        return case.draw(torch.Generator())

    return Stopwatch(device, Step(case, CPU, Compile.EAGER), draw)


def test_a_cpu_has_no_coverage_and_a_reason() -> None:
    assert profile_step(watch(CPU)) == (None, "no coverage: no GPU takes part")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_failing_profile_is_a_reason() -> None:
    coverage, note = profile_step(watch(torch.device("cuda")))
    assert coverage is None
    assert note.startswith("no coverage: ")
    assert len(note) > len("no coverage: ")


@pytest.mark.filterwarnings("ignore::UserWarning")  # that there is no CUDA
def test_the_trace_of_a_real_step_is_read_and_has_no_kernel_on_a_cpu() -> None:
    events = trace_step(watch(CPU))
    assert any(event.get("name") == "aten::sin" for event in events)
    assert count(events) is None


@pytest.mark.gpu
def test_a_replayed_graph_and_eager_kernels_are_told_apart() -> None:
    values = torch.ones(64, device="cuda")
    (values + 1).mul(2)  # so that no kernel is loaded while the graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = values + 1
        for _ in range(4):
            made = made * 2

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        graph.replay()
        return inputs["values"].sin().cos().exp()

    device = torch.device("cuda")
    case = Case(torch.nn.Identity(), lambda _: {"values": values}, call, precision=torch.float32)
    stopwatch = Stopwatch(device, Step(case, device, Compile.EAGER), lambda: {"values": values})
    coverage, note = profile_step(stopwatch)
    assert coverage, note
    assert (coverage.kernels_in_graphs, coverage.kernels, coverage.graph_launches) == (5, 8, 1)
