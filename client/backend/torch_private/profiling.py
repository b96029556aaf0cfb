"""Tells whether a profiler of torch runs, and names a range in its trace."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAG = "_is_profiler_enabled"
CUPTI_VARIABLES = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""Variables that `torch.profiler` sets itself where Inductor's global options ask for CUDA graphs."""


def profiler_flag() -> tuple[dict[str, Any], str]:
    """Return a dict and its key that is True while `torch.profiler`, `emit_nvtx` or `emit_itt` runs: reading it takes 10 ns."""
    return vars(torch.autograd.profiler), _FLAG


def is_profiled() -> bool:
    """Return whether a profiler runs in this process."""
    return getattr(torch.autograd.profiler, _FLAG, False) is True


def keep_cupti() -> None:
    """Have `torch.profiler` leave CUPTI as it is after a profile, unless the user has set this otherwise.

    Once CUPTI has gone and come back, launching graphs that were made before may crash the process (CUDA 12 and 13).
    """
    for name, value in CUPTI_VARIABLES.items():
        os.environ.setdefault(name, value)


def named(run: Callable[[list[Any]], Any], name: str) -> Callable[[list[Any]], Any]:
    """Return a callable that calls `run` within a range of the trace, which on a GPU also spans the kernels launched in it."""

    def call(inputs: list[Any]) -> Any:
        with torch.autograd.profiler.record_function(name):
            return run(inputs)

    return call
