"""Trains the language model of ddp_train.py with its parameters sharded (FSDP2): `torchrun --nproc-per-node 2 fsdp2_train.py`.

Each block is compiled by itself, so that parameters are gathered between compiled graphs.
"""

from typing import Any

from ddp_train import make, train
from measuring import DEVICE, joined, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` steps."""
    rank, world = joined()
    mesh = init_device_mesh(DEVICE, (world,))
    model = make(tiny).to(DEVICE)
    for block in model.blocks:
        if mode != "none":
            block.compile(mode=mode)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, model.tokens.num_embeddings, rank, steps, tiny)


if __name__ == "__main__":
    run(main, __doc__)
