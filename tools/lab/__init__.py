"""Measurements for those who work on PyGraph, on machines that are lent for minutes: `python -m tools.lab`, from the repository root.

`benchmarks/` holds what a user runs and knows nothing of this package, which adds some workloads to it.
"""

from __future__ import annotations

from benchmarks.workloads import WORKLOADS, Mode, Workload

_SOURCE = "tools.lab.synthetic"
SYNTHETIC = (
    Workload("wide-inference", Mode.INFERENCE, 64, f"{_SOURCE}:wide_inference"),
    Workload("deep-inference", Mode.INFERENCE, 64, f"{_SOURCE}:deep_inference", in_all=False),
    Workload("autoencoder-inference", Mode.INFERENCE, 4096, f"{_SOURCE}:autoencoder_inference"),
    Workload("heavy-then-small", Mode.INFERENCE, 4096, f"{_SOURCE}:heavy_then_small"),
    Workload("small-then-heavy", Mode.INFERENCE, 4096, f"{_SOURCE}:small_then_heavy"),
)
WORKLOADS.update({each.name: each for each in SYNTHETIC})
