"""Reads what PyTorch's allocator counts of a device's memory.

`torch.cuda.memory_allocated` and its kind flatten and sort all statistics at each call, which a recording would ask for a hundred times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AllocatorCounts:
    """Bytes of one device. All are 0 before CUDA is initialized."""

    allocated: int
    reserved: int
    """What PyTorch holds of the device: the allocated bytes, and those that are free in its cache."""
    most_allocated: int
    """The peak. The program may have set it back, as that of `most_reserved`."""
    most_reserved: int
    freed_so_far: int
    """The sum since the process began."""


def allocator_counts(device: torch.device | int) -> AllocatorCounts:
    """Return the counts of a CUDA device."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    # torch answers so before CUDA is initialised, and does not initialise it for the question.
    if not found:
        return AllocatorCounts(0, 0, 0, 0, 0)
    allocated, reserved = (found[name]["all"] for name in ("allocated_bytes", "reserved_bytes"))
    return AllocatorCounts(
        allocated["current"],
        reserved["current"],
        allocated["peak"],
        reserved["peak"],
        allocated["freed"],
    )
