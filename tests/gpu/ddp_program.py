"""`python ddp_program.py RANK WORLD FOLDER`: one rank of a small training under DistributedDataParallel, on its own GPU.

It is compiled in the mode `DDP_MODE`, or `reduce-overhead`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Network(torch.nn.Module):  # type: ignore[misc]
    """A class of its own: Dynamo skips torch's modules where DistributedDataParallel has broken the graph."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return eight numbers an item."""
        result: torch.Tensor = self.layers(x)
        return result


def main(rank: int, world: int, folder: Path) -> None:
    """Train, and write the losses."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    torch.manual_seed(0)
    module = DistributedDataParallel(Network().cuda(), device_ids=[rank])
    run = torch.compile(module, mode=os.environ.get("DDP_MODE", "reduce-overhead"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(300):
        x = torch.randn(32, 64, device="cuda")
        loss = (run(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    (folder / f"losses.{rank}").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
