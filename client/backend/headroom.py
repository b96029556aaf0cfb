"""Memory to run graphs launched beside captures of them, which keep their own: whether there is enough."""

from __future__ import annotations

import torch

from pygraphd.client.decisions import rules

MARGIN = 1.2
"""Free memory must exceed by this factor what is going to be needed."""


def why_not_beside(device: int) -> str | None:
    """Return why no step should be launched beside what is captured; what it takes beyond what is allocated now has been seen just before."""
    needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    return rules.NO_MEMORY if needed * MARGIN > free else None
