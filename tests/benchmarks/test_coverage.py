"""What is inside CUDA graphs, counted in traces as `torch.profiler` writes them (torch 2.11 to 2.15)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.coverage import Coverage, count

Events = list[dict[str, Any]]


def call(name: str, correlation: int, category: str = "cuda_runtime") -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, "ts": 100.0 + correlation, "dur": 3.5,
        "args": {"cbid": 211, "correlation": correlation, "External id": 3},
    }  # fmt: skip


def kernel(correlation: int) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "kernel", "name": "triton_poi_fused_add_0", "pid": 0, "tid": 7, "ts": 200.0, "dur": 1.2,
        "args": {
            "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": correlation,
            "registers per thread": 16, "shared memory": 0, "grid": [1, 1, 1], "block": [128, 1, 1],
        },
    }  # fmt: skip


def copy(correlation: int, *, category: str = "gpu_memcpy") -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7, "ts": 200.0,
        "dur": 1.2, "args": {"device": 0, "stream": 7, "correlation": correlation, "bytes": 8},
    }  # fmt: skip


def of_graph(work: dict[str, Any], graph: int) -> dict[str, Any]:
    return {**work, "args": {**work["args"], "graph id": graph, "graph node id": graph << 32}}


AROUND: Events = [
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7, "ts": 2.0, "dur": 9.0, "args": {"External id": 3}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 7, "tid": 7, "ts": 2.0, "dur": 9.0},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 7, "tid": 7, "ts": 3.0},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 7, "tid": 7, "ts": 9.0, "args": {"correlation": 90}},
    {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 10.0},
]  # fmt: skip
"""What a trace has beside the calls and the work that count."""

LAUNCHED: Events = [
    call("cudaLaunchKernel", 1), kernel(1),
    call("cuLaunchKernel", 2, "cuda_driver"), kernel(2),
    call("cudaLaunchKernelExC", 3), kernel(3),
    call("cudaMemcpyAsync", 4), copy(4),
    call("cudaMemsetAsync", 5), copy(5, category="gpu_memset"),
]  # fmt: skip


def test_kernels_are_counted_by_the_call_with_their_correlation() -> None:
    replayed = [call("cudaGraphLaunch", 8), *[kernel(8)] * 5, copy(8)]
    seen = count([*AROUND, *LAUNCHED, *replayed])
    assert seen == Coverage(5, 8, graph_launches=1)
    assert seen.share == 5 / 8
    assert str(seen) == "5 of 8 kernels in 1 graph launches"


def test_every_launch_of_a_graph_counts() -> None:
    events = [call("cudaGraphLaunch_ptsz", 8), kernel(8), call("cuGraphLaunch", 9, "cuda_driver"), kernel(9)]
    assert count([*AROUND, *events]) == Coverage(2, 2, graph_launches=2)


def test_a_graph_without_kernels_is_no_launch() -> None:
    assert count([*LAUNCHED, call("cudaGraphLaunch", 8)]) == Coverage(0, 3, 0)


@pytest.mark.parametrize("named", [True, False])
def test_the_ids_of_graphs_tell_what_no_call_does(named: bool) -> None:
    events = [
        *([call("cuGraphLaunch", 8, "cuda_driver")] if named else []),
        of_graph(kernel(8), 12),
        of_graph(kernel(8), 12),
        of_graph(copy(8), 12),
        call("cudaLaunchKernel", 1),
        of_graph(kernel(1), 0),
    ]
    assert count([*AROUND, *events]) == Coverage(2, 3, graph_launches=1)


def test_kernels_without_a_call_are_not_guessed_where_graphs_have_ids() -> None:
    assert count([of_graph(kernel(8), 12), of_graph(kernel(9), 0)]) == Coverage(1, 2, graph_launches=1)


def test_without_ids_kernels_whose_launch_is_not_in_the_trace_are_a_graphs() -> None:
    seen = count([*AROUND, *LAUNCHED, kernel(8), kernel(8), copy(8), kernel(9), copy(10)])
    assert seen == Coverage(3, 6, graph_launches=2)


@pytest.mark.parametrize("events", [[], AROUND, [call("cudaMemcpyAsync", 4), copy(4)]])
def test_a_trace_without_kernels_has_no_coverage(events: Events) -> None:
    assert count(events) is None
