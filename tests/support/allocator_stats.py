"""What CUDA's allocator says of its memory, made up."""

from __future__ import annotations

from typing import Any


def stats(reserved: int, allocated: int, most_reserved: int, most_allocated: int) -> dict[str, int]:
    """Return what `torch.cuda.memory_stats` says of this, as far as it is looked at."""
    return {
        "reserved_bytes.all.current": reserved,
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.peak": most_reserved,
        "allocated_bytes.all.peak": most_allocated,
    }


def nested(
    reserved: int, allocated: int, most_reserved: int | None = None, *, made: int = 0, freed: int = 0
) -> dict[str, Any]:
    """Return what `torch.cuda.memory_stats_as_nested_dict` says, as far as it is looked at: `made` and `freed` bytes so far."""
    most = max(reserved, most_reserved or 0)
    return {
        "reserved_bytes": {"all": {"current": reserved, "peak": most}},
        "allocated_bytes": {
            "all": {"current": allocated, "peak": allocated, "allocated": made, "freed": freed}
        },
    }
