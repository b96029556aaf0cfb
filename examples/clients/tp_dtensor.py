"""Runs a tower of feed-forward blocks on several GPUs by DTensor: `torchrun --nproc-per-node 2 tp_dtensor.py`.

`parallelize_module` shares out the weights, and the compiled graph holds functional collectives that DTensor inserts.
"""

from typing import Any

import torch
from measuring import DEVICE, Clock, compiled, joined, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

LAYERS, WIDTH, BATCH = 24, 2048, 16
TINY_LAYERS, TINY_WIDTH = 2, 64


class Block(nn.Module):
    """A feed-forward layer behind a norm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@torch.no_grad()
def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Run `steps` batches, the same on each rank."""
    _, world = joined()
    layers, width = (TINY_LAYERS, TINY_WIDTH) if tiny else (LAYERS, WIDTH)
    with torch.device(DEVICE):
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
    mesh = init_device_mesh(DEVICE, (world,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    step, clock = compiled(model, mode, fullgraph=True), Clock(steps)
    for _ in range(steps):
        x = torch.randn(BATCH, width, device=DEVICE)
        clock.begin()
        out = step(x)
        clock.end(out)
    return clock.result(tolerance=0.01)


if __name__ == "__main__":
    run(main, __doc__)
