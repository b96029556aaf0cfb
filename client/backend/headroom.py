"""Tells whether GPU memory suffices to run KERNELS beside recordings, which keep memory of their own."""

from __future__ import annotations

import torch

MARGIN = 1.2
"""The factor by which free memory has to exceed the needed memory."""


def is_enough_beside(device: int) -> bool:
    """Return whether a device has free memory for a step that runs as KERNELS beside recordings.

    The need of a step is estimated as the difference between peak and current allocation, as a step has just run.
    """
    needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    return bool(needed * MARGIN <= free)
