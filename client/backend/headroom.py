"""Memory to run graphs launched beside captures of them, which keep their own: whether there is enough."""

from __future__ import annotations

import torch

MARGIN = 1.2
"""Free memory must exceed by this factor what is going to be needed."""


def is_enough_beside(device: int) -> bool:
    """Whether a step may be launched beside what is captured; what it takes beyond what is allocated now has been seen just before."""
    needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    return bool(needed * MARGIN <= free)
