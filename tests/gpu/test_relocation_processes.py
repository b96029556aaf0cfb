"""Recordings graphs in whole processes of users': several ranks, an allocator that is set otherwise, captures of theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend.errors import IN_A_CAPTURE
from tests.support.rank_processes import environ, ours, started, summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROGRAM = Path(__file__).with_name("ddp_program.py")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def ranks(folder: Path, world: int, more: Callable[[int], dict[str, str]]) -> list[list[float]]:
    """Train on `world` GPUs; return the losses of each."""
    started(PROGRAM, folder, world, more)
    return [json.loads((folder / f"losses.{rank}").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2])
def test_distributed_data_parallel(tmp_path: Path, world: int) -> None:
    """NCCL with one rank to talk to, and with two, each on a GPU of its own, which run each graph in the same way."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"it needs {world} GPUs")

    mode = {"DDP_MODE": "default"}
    plain = ranks(tmp_path / "plain", world, lambda _: mode)
    mine = ranks(tmp_path / "ours", world, lambda rank: mode | ours(tmp_path / "ours", rank))

    torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)
    all_said = [summary(tmp_path / "ours", rank) for rank in range(world)]
    for said in all_said:
        assert said["captured"] >= 2
        assert said["deployed"]["GRAPH"] > 0
        assert {each for each in said["failures"] if not each.startswith("daemon: ")} == set()
    first, *others = ({each["graph"]: each["deployment"] for each in said["decisions"]} for said in all_said)
    assert len(first) == all_said[0]["graphs"] > 0
    assert others == [first] * (world - 1)
    if world > 1:
        led, followed = (sum(said[what] for said in all_said) for what in ("led", "followed"))
        assert led == followed == all_said[0]["graphs"]


def test_training_with_segments_that_expand(tmp_path: Path) -> None:
    """What replays allocate lies in memory that is mapped as it is needed, and given back from under it."""
    expand = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "DDP_MODE": "default"}
    folder = tmp_path / "ours"

    plain = ranks(tmp_path / "plain", 1, lambda _: expand)
    mine = ranks(folder, 1, lambda rank: {**ours(folder, rank), **expand})

    torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)
    said = summary(folder)
    assert said["captured"] >= 2
    assert said["deployed"]["GRAPH"] > 0
    assert {each for each in said["failures"] if not each.startswith("daemon: ")} == set()


@pytest.mark.parametrize("settings", ["expandable_segments:True", "max_split_size_mb:64"])
def test_other_settings_of_the_allocator(tmp_path: Path, settings: str) -> None:
    done = subprocess.run(
        [sys.executable, QUICKSTART],
        env=environ(tmp_path, PYTORCH_CUDA_ALLOC_CONF=settings, **ours(tmp_path)),
        timeout=115,
        check=False,
    )

    assert done.returncode == 0
    said = summary(tmp_path)
    assert said["captured"] == said["measured"] > 0  # its training, by its attention, is left to PyTorch
    assert {each for each in said["failures"] if not each.startswith("daemon: ")} == set()


def test_make_graphed_callables_around_it(relocated: Relocated) -> None:
    """The user captures: within, everything runs as KERNELS, and is right when their graph is replayed."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda()
    run = torch.compile(module, mode="reduce-overhead", dynamic=False)
    for _ in range(4):
        run(torch.randn(32, 64, device="cuda")).sum().backward()
    captured = relocated.report.counts["captured"]
    assert captured == 2

    class Wrapped(torch.nn.Module):  # type: ignore[misc]
        """A module as `make_graphed_callables` wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Run the compiled module."""
            result: torch.Tensor = run(x)
            return result

    sample = torch.randn(32, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(Wrapped(), (sample,))
    for _ in range(4):
        x = torch.randn(32, 64, device="cuda", requires_grad=True)
        result = graphed(x)
        result.square().sum().backward()
        expected = torch.autograd.grad(module(x).square().sum(), x)[0]
        torch.testing.assert_close(result, module(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-3)
    assert relocated.report.fallbacks[IN_A_CAPTURE] > 0
