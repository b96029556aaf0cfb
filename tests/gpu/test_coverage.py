"""What the summary says of how much of a step runs inside CUDA graphs, in programs of users'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.step_profile import OTHER_PROFILER

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUT = """
import torch
weights = [torch.randn(64, 64, device="cuda") / 8 for _ in range(24)]
def model(x):
    for weight in weights[:12]: x = (x @ weight).relu()
    x = x[torch.tensor([3, 1, 2, 0])]
    for weight in weights[12:]: x = (x @ weight).tanh()
    return x
run = torch.compile(model, mode="reduce-overhead")
with torch.no_grad():
    for _ in range(600): run(torch.randn(8, 64, device="cuda"))
"""
TRAINING = """
import torch
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).cuda()
run = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(600):
    run(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PROFILED = """
import torch
weights = [torch.randn(64, 64, device="cuda") / 8 for _ in range(24)]
def model(x):
    for weight in weights: x = (x @ weight).relu()
    return x
run = torch.compile(model, mode="reduce-overhead")
def steps(count):
    for _ in range(count): run(torch.randn(8, 64, device="cuda"))
with torch.no_grad():
    steps({before})
    with torch.profiler.profile() as profiler: steps(3)
    print(sum(event.device_type.name == "CUDA" for event in profiler.events()))
    steps(300)
"""


def coverage(program: str, folder: Path, **more: str) -> dict[str, Any]:
    folder.mkdir()
    environ = {
        **os.environ,
        "PYGRAPH": "1",
        "PYGRAPH_COVERAGE": "1",
        "PYGRAPH_SUMMARY": str(folder / "summary.json"),
        "PYGRAPHD_HOME": str(folder / "home"),
        "PYGRAPHD_AUTOSTART": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, timeout=170, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("USDT")) == (0, 0), done.stderr
    if done.stdout:
        assert int(done.stdout) > 3  # what the program's own profiler has seen of the GPU
    said: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    print(json.dumps(said, indent=1))  # noqa: T201 - what was deployed, for whoever runs this
    found: dict[str, Any] = said["coverage"]
    assert {each for each in said["failures"] if not each.startswith("daemon: ")} == set()
    return found


def test_with_the_rules_all_of_a_graph_that_was_cut_is_captured(tmp_path: Path) -> None:
    placed = coverage(CUT, tmp_path / "placed")
    launched = CUT.replace(', mode="reduce-overhead"', "")
    alone = coverage(launched, tmp_path / "alone", PYGRAPH_RELOCATE="0")

    # Drawing the input is a part of the step.
    assert placed["kernels"] - placed["kernels_in_graphs"] == 1
    assert placed["kernels_in_graphs"] >= 24
    assert placed["graph_launches"] == 1
    assert alone["kernels"] >= 24
    assert (alone["kernels_in_graphs"], alone["graph_launches"]) == (0, 0)


def test_a_step_of_training_has_its_backward_and_its_optimizer(tmp_path: Path) -> None:
    found = coverage(TRAINING, tmp_path / "training")

    assert found["graph_launches"] == 2
    assert found["kernels"] > found["kernels_in_graphs"] >= 24  # what the optimiser runs is not compiled


@pytest.mark.parametrize("before", [150, 400])
def test_a_profiler_of_the_programs_own_is_left_alone(tmp_path: Path, before: int) -> None:
    found = coverage(PROFILED.format(before=before), tmp_path / "profiled")

    if before > 300:  # ours had ended
        assert found["kernels_in_graphs"] >= 24
    else:
        assert found == {"reason": OTHER_PROFILER}
