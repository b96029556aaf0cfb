"""What CUDA's allocator says of its memory, made up."""

from __future__ import annotations


def stats(reserved: int, allocated: int, most_reserved: int, most_allocated: int) -> dict[str, int]:
    """Return what `torch.cuda.memory_stats` says of this, as far as it is looked at."""
    return {
        "reserved_bytes.all.current": reserved,
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.peak": most_reserved,
        "allocated_bytes.all.peak": most_allocated,
    }
