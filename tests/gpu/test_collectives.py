"""Programs on two GPUs whose compiled graphs hold collectives, or run between some: captured on all ranks or on none, right, and never hanging."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.rank_processes import environ, ours, summary

if TYPE_CHECKING:
    from collections.abc import Mapping

WORLD = 2
PROGRAM = Path(__file__).with_name("ranks_program.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"it needs {WORLD} GPUs"),
]
LIMIT_S = 300.0
"""Seconds after which a rank counts as hanging: the limits of an attempt, and the group's time-out of 20 s."""


def ended(folder: Path, kind: str, *by_rank: Mapping[str, str], mine: bool = True) -> list[int]:
    """Run a program on all ranks, each with its settings (or all with the first); return how each has ended. None may hang."""
    folder.mkdir(exist_ok=True)
    processes = []
    for rank in range(WORLD):
        settings = {**(ours(folder, rank) if mine else {}), **by_rank[rank % len(by_rank)]}
        command = [sys.executable, str(PROGRAM), str(rank), str(WORLD), str(folder), kind]
        processes.append(subprocess.Popen(command, env=environ(folder, **settings)))
    try:
        return [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()


def results(folder: Path) -> list[list[float]]:
    return [json.loads((folder / f"results.{rank}").read_text()) for rank in range(WORLD)]


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank says. All run each graph alike, and nothing has failed."""
    said = [summary(folder, rank) for rank in range(WORLD)]
    for each in said:
        assert {text for text in each["failures"] if not text.startswith("daemon: ")} == set()
    first, *others = ({each["graph"]: each["deployment"] for each in one["decisions"]} for one in said)
    assert others == [first] * (WORLD - 1)
    return said


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_tensor_parallel_layers_are_captured_on_all_ranks(tmp_path: Path, mode: str) -> None:
    assert ended(tmp_path, "tensor_parallel", {"MODE": mode}) == [0] * WORLD

    assert max(map(max, results(tmp_path))) < 1e-3
    for said in summaries(tmp_path):
        assert said["captured"] == 1
        assert said["deployed"] == {"KERNELS": 0, "GRAPH": 1}


def test_a_second_program_knows_the_decision_and_records_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    home = {"PYGRAPHD_HOME": str(tmp_path / "home"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    for folder in (first, second):
        assert ended(folder, "tensor_parallel", home) == [0] * WORLD

    assert max(map(max, results(second))) < 1e-3
    for said in summaries(second):
        assert said["captured"] == 1


@pytest.mark.parametrize(
    ("refusing", "setting", "why"),
    [
        (0, {"NCCL_GRAPH_REGISTER": "1"}, "NCCL_GRAPH_REGISTER=1"),
        (1, {"NCCL_GRAPH_REGISTER": "1"}, "NCCL_GRAPH_REGISTER=1"),
        (1, {"FAILS": "1"}, "it was told to fail"),
    ],
)
def test_one_rank_that_refuses_has_all_run_kernels(
    tmp_path: Path, refusing: int, setting: dict[str, str], why: str
) -> None:
    by_rank = [setting if rank == refusing else {} for rank in range(WORLD)]

    assert ended(tmp_path, "tensor_parallel", *by_rank) == [0] * WORLD

    assert max(map(max, results(tmp_path))) < 1e-3
    for said in summaries(tmp_path):
        assert said["captured"] == 0
        assert said["deployed"] == {"KERNELS": 1, "GRAPH": 0}
        assert any(why in each for each in (*said["fallbacks"], *said["reasons"]))


@pytest.mark.parametrize("moment", ["begins", "captures", "replays", "serves"])
def test_a_rank_that_is_killed_leaves_no_other_waiting_for_ever(tmp_path: Path, moment: str) -> None:
    """The other ends as it would without PyGraph: by the watchdog of c10d, or by ours, which watches replays."""
    settings = {"DIES": f"1:{moment}", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}

    first, killed = ended(tmp_path, "tensor_parallel", settings)

    assert killed == -9
    assert first != 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["ddp", "ddp_in_graph", "fsdp2"])
def test_training_steps_have_the_losses_of_plain_ones(tmp_path: Path, kind: str, mode: str) -> None:
    if kind == "ddp_in_graph" and mode != "default":
        pytest.skip("compiled autograd is compiled in one mode")
    plain, mine = tmp_path / "plain", tmp_path / "ours"

    assert ended(plain, kind, {"MODE": "default"}, mine=False) == [0] * WORLD
    assert ended(mine, kind, {"MODE": mode}) == [0] * WORLD

    torch.testing.assert_close(results(mine), results(plain), rtol=1e-3, atol=1e-4)
    for said in summaries(mine):
        assert said["captured"] > 0
        # The parameters of FSDP2 have other addresses at each step, and what is written for that may take longer than it saves.
        assert said["deployed"]["GRAPH"] > 0 or kind == "fsdp2"
