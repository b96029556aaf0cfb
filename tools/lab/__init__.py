"""Measurements for those who work on PyGraph, on machines that are lent for minutes: `python -m tools.lab`, from the repository root.

`benchmarks/` holds what is measured, and measures one process at a time. This package adds some workloads to it, and measures processes
side by side.
"""

from __future__ import annotations

from benchmarks.workloads import WORKLOADS, Mode, Workload

_SOURCE = "tools.lab.workloads"
OURS = (
    Workload("wide-inference", Mode.INFERENCE, 64, f"{_SOURCE}.synthetic:wide_inference"),
    Workload("deep-inference", Mode.INFERENCE, 64, f"{_SOURCE}.synthetic:deep_inference", in_all=False),
    Workload("autoencoder-inference", Mode.INFERENCE, 4096, f"{_SOURCE}.synthetic:autoencoder_inference"),
    Workload("heavy-then-small", Mode.INFERENCE, 4096, f"{_SOURCE}.synthetic:heavy_then_small"),
    Workload("small-then-heavy", Mode.INFERENCE, 4096, f"{_SOURCE}.synthetic:small_then_heavy"),
    Workload("sampler-inference", Mode.INFERENCE, 64, f"{_SOURCE}.sampling:sampler_inference"),
    Workload("diffusion-inference", Mode.INFERENCE, 64, f"{_SOURCE}.diffusion:diffusion_inference"),
    Workload("adam-step", Mode.INFERENCE, 1, f"{_SOURCE}.optimization:adam_step"),
)
# At import: each command and child process of the lab imports this package first, and so knows these
# workloads by name.
WORKLOADS.update({each.name: each for each in OURS})
