"""`python ranks_program.py RANK WORLD FOLDER KIND`: one rank of a program that computes on all ranks, each on a GPU of its own.

KIND is what it runs: `tensor_parallel` (decoder layers whose products are summed over the ranks, within the compiled graph), `ddp` (training
steps with the reducer between graphs), `ddp_in_graph` (with the reductions in the compiled backward) or `fsdp2` (compiled blocks). The
results of rank R are written to `results.R`. With `DIES=R:MOMENT`, rank R kills itself when it `begins` an attempt to record, before it votes
that it `captures`, before it `replays`, or when it `serves`. With `FAILS=R`, nothing can be captured on rank R.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast can put the GPUs of a host out of service
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = os.environ["NVSHMEM_DISABLE_NVLS"] = "1"

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

RANK, WORLD, FOLDER, KIND = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
STEPS = 400
WIDTH, HEADS = 256, 8
TIMEOUT = datetime.timedelta(seconds=20 if "DIES" in os.environ else 120)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def may_die(moment: str) -> None:
    if os.environ.get("DIES") == f"{RANK}:{moment}":
        die()


def fail_in_an_attempt() -> None:
    """Have this rank die before it votes on what it has captured or between that vote and its replay, or fail to capture, if it is to."""
    from pygraphd.client.backend.errors import NotRelocatableError
    from pygraphd.client.decisions.ranks import process_group
    from pygraphd.client.decisions.ranks.lockstep import Lockstep
    from pygraphd.client.recording.capture import CudaRecorder

    process_group.MIN_TIMEOUT_S = 0.0  # so that a rank that has died is waited for not too long

    def fail(*_: object, **__: object) -> None:
        raise NotRelocatableError("it was told to fail")

    if os.environ.get("FAILS") == str(RANK):
        CudaRecorder.capture = fail  # type: ignore[assignment, method-assign]

    go_on = Lockstep.go_on

    @functools.wraps(go_on)
    def hooked(lockstep: Lockstep) -> None:
        if lockstep.steps == 0:
            may_die("captures")
        go_on(lockstep)
        if lockstep.steps == 1:
            may_die("replays")

    Lockstep.go_on = hooked  # type: ignore[assignment, method-assign]


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A decoder layer of which each rank has its part of the heads and of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.group = dist.group.WORLD.group_name
        shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}  # fmt: skip
        for name, (rows, columns) in shapes.items():
            whole = torch.randn(rows, columns) * columns**-0.5
            self.register_buffer(name, part(name, whole).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many numbers as came in."""
        batch, length, _ = x.shape
        normed = functional.rms_norm(x, (WIDTH,))
        heads = functional.linear(normed, self.qkv).view(batch, length, 3, HEADS // WORLD, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        mixed = (scores @ value).transpose(1, 2).reshape(batch, length, -1)
        x = x + all_reduce(functional.linear(mixed, self.out), "sum", self.group)
        inner = functional.silu(functional.linear(functional.rms_norm(x, (WIDTH,)), self.up))
        result: torch.Tensor = x + all_reduce(functional.linear(inner, self.down), "sum", self.group)
        return result


def part(name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight: rows of those that split heads and hidden numbers, columns of those that join them."""
    if name == "qkv":
        return torch.cat([each.chunk(WORLD)[RANK] for each in whole.chunk(3)])
    return whole.chunk(WORLD, 0 if name == "up" else 1)[RANK]


def tensor_parallel() -> list[float]:
    """Return how far each step is from what the layers compute eagerly."""
    fail_in_an_attempt()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(Layer() for _ in range(3))).cuda()
    run = torch.compile(layers, mode=os.environ.get("MODE"), fullgraph=True)
    away, kept = [], []
    with torch.no_grad():
        for step in range(STEPS):
            torch.manual_seed(100 + step)
            x = torch.randn(4, 16, WIDTH, device="cuda")
            kept.append(torch.empty(1 + 1000 * (step % 5), device="cuda"))  # so that addresses differ
            right = layers(x)
            if step == 2:
                may_die("begins")
            if step == STEPS - 5:
                may_die("serves")
            away.append((run(x) - right).abs().max().item())
    return away


class Network(torch.nn.Module):  # type: ignore[misc]
    """A class of its own: Dynamo skips torch's modules where DistributedDataParallel has broken the graph."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each item."""
        result: torch.Tensor = self.layers(x)
        return result


def ddp(*, in_graph: bool) -> list[float]:
    """Return the losses of training under DistributedDataParallel."""
    if in_graph:
        torch._dynamo.config.optimize_ddp = "python_reducer"
    torch.manual_seed(0)
    module = DistributedDataParallel(Network(8).cuda(), device_ids=[RANK])
    run: Any = torch.compile(module, mode=os.environ.get("MODE"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (run(x) - x[:, :8]).square().mean()
        if in_graph:
            with torch._dynamo.compiled_autograd._enable(torch.compile(mode=os.environ.get("MODE"))):
                loss.backward()
        else:
            loss.backward()
        return loss

    return trained(step, optimizer, lambda: torch.randn(32, WIDTH, device="cuda"))


def fsdp2() -> list[float]:
    """Return the losses of training under FSDP2, with each block compiled."""
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Network() for _ in range(4))).cuda()
    for block in blocks:
        block.compile(mode=os.environ.get("MODE"))
        fully_shard(block)
    fully_shard(blocks)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (blocks(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        return loss

    return trained(step, optimizer, lambda: torch.randn(64, WIDTH, device="cuda"))


def trained(
    step: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, batch: Callable[[], torch.Tensor]
) -> list[float]:  # fmt: skip
    torch.manual_seed(1 + RANK)
    losses = []
    for _ in range(STEPS):
        loss = step(batch())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Run the program, and write its results."""
    device = torch.device("cuda", RANK)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{FOLDER / 'store'}", rank=RANK, world_size=WORLD, device_id=device, timeout=TIMEOUT)  # fmt: skip
    kinds: dict[str, Callable[[], list[float]]] = {"tensor_parallel": tensor_parallel, "ddp": functools.partial(ddp, in_graph=False), "ddp_in_graph": functools.partial(ddp, in_graph=True), "fsdp2": fsdp2}  # fmt: skip
    results = kinds[KIND]()
    (FOLDER / f"results.{RANK}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
