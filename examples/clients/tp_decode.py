"""Decodes with the Llama of gpt_decode.py on several GPUs, tensor-parallel as in gpt-fast: `torchrun --nproc-per-node 2 tp_decode.py`.

Each rank has a share of the heads and of the feed-forward layer, and the results of both are summed over the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from gpt_decode import LARGE, TINY, Attention, Llama, generate, make
from measuring import joined, run
from torch import nn


def summed(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Sum a module's output over the ranks; a forward hook."""
    dist.all_reduce(output)
    return output


def keep(linear: nn.Linear, rank: int, world: int, axis: int, parts: list[int] | None = None) -> None:
    """Keep a rank's share of a layer's weight along an axis; `parts` of it are shared out each by itself."""
    weights = linear.weight.split(parts or [linear.weight.shape[axis]], dim=axis)
    linear.weight = nn.Parameter(torch.cat([each.chunk(world, axis)[rank] for each in weights], axis))


def share_out(model: Llama, rank: int, world: int) -> None:
    """Keep a rank's share of a model."""
    for block in model.blocks:
        attention: Attention = block.attention
        queries, keys = attention.heads * attention.head, attention.kv_heads * attention.head
        keep(attention.wqkv, rank, world, 0, [queries, keys, keys])
        keep(attention.wo, rank, world, 1)
        attention.heads, attention.kv_heads = attention.heads // world, attention.kv_heads // world
        attention.keys = attention.keys[:, : attention.kv_heads].clone()
        attention.values = attention.values[:, : attention.kv_heads].clone()
        attention.register_forward_hook(summed)
        for layer, axis in (
            (block.feed_forward.gate, 0),
            (block.feed_forward.up, 0),
            (block.feed_forward.down, 1),
        ):
            keep(layer, rank, world, axis)
        block.feed_forward.register_forward_hook(summed)


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Generate `steps` tokens, the same on each rank."""
    rank, world = joined()
    sizes = TINY if tiny else LARGE
    model = make(sizes)
    share_out(model, rank, world)
    return generate(model, mode, steps, sizes)


if __name__ == "__main__":
    run(main, __doc__)
