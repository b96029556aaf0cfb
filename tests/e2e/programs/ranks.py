"""A user's data-parallel training for these tests: gloo, on the CPU. Arguments: rank, ranks, a file to meet at."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    """A class of its own: Dynamo skips torch's modules where DistributedDataParallel has broken the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    rank, world, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(7)
    module = Network()
    run = torch.compile(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        torch.manual_seed(100 * step + rank)
        loss = run(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss := loss.detach())
        print(f"step {step}: loss {loss.item() / world:.5f}")
    # Without it a rank that is done first ends connections that others are still at work on: some then abort, with and without PyGraph.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
