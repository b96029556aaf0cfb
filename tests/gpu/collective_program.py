"""`python collective_program.py RANK WORLD FOLDER`: one rank of a function that sums over all ranks within its compiled graph."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

CALLS = 60


def main(rank: int, world: int, folder: Path) -> None:
    """Call it, and write how often it was right."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    ranks, group = range(world), dist.group.WORLD.group_name

    def summed(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x * 2).sin()
        total: torch.Tensor = all_reduce(x, "sum", group) + x
        return total

    run = torch.compile(summed)
    right = 0
    with torch.no_grad():
        for call in range(CALLS):
            parts = [torch.linspace(0, call + each + 1, 1000, device="cuda") for each in ranks]
            result = run(parts[rank])
            for _ in range(4):
                parts = [(part * 2).sin() for part in parts]
            right += torch.allclose(result, sum(parts) + parts[rank], rtol=1e-4, atol=1e-4)
    (folder / f"right.{rank}").write_text(str(right))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
