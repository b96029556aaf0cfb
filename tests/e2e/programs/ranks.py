"""A user's data-parallel training for these tests: gloo, on the CPU. Arguments: rank, ranks, a file to meet at."""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    """A class of its own: Dynamo skips torch's modules where DistributedDataParallel has broken the graph.

    Matrix products alone: no C++ compiler takes its seconds for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    torch.set_num_threads(1)
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


def end() -> None:
    """Have the group's threads end while Python is there: where the group lives on, as in Dynamo's caches, one program of ten aborts.

    With and without PyGraph: they let go of tensors then.
    """
    torch._dynamo.reset()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end()
