"""Programs of users', from their beginning to their exit: how they end, and what the summary then says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.backend.errors import PROFILED

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
run = torch.compile(model, mode="{mode}")
with torch.no_grad():
    for _ in range(200): run(torch.randn(8, 64, device="cuda"))
"""
ON_A_THREAD = """
import sys, threading, torch
def work():
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    run = torch.compile(model, mode="{mode}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(200):
        run(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print("torch._inductor.cudagraph_trees" in sys.modules)
"""

PROFILED_TWICE = """
import torch
from torch.profiler import ProfilerActivity, profile
weight = torch.randn(64, 50000, device="cuda")
@torch.compile(mode="{mode}")
def step(x):
    for _ in range(4): x = (x @ weight).relu() @ weight.T / 5e4
    return (x @ weight).topk(50).values.tanh()
x = torch.randn(8, 64, device="cuda")
for _ in range({profiles_before}):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]): x.sum()
streams = [torch.cuda.Stream() for _ in range(4)]
def everywhere():  # each stream has memory of its own
    for stream in streams * 4:
        with torch.cuda.stream(stream): step(x)
    torch.cuda.synchronize()
with torch.inference_mode():
    for _ in range(200): step(x)
    torch.cuda.synchronize()
    for _ in range(4):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]): everywhere()
        if {is_run_between}: everywhere()  # gets executables
        torch.cuda.empty_cache()
    everywhere()
"""


def run(program: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what a program prints, and its summary; it must end well."""
    environ = {
        **os.environ,
        "PYGRAPH": "1",
        "PYGRAPH_SUMMARY": str(folder / "summary.json"),
        "PYGRAPHD_HOME": str(folder / "home"),
        "PYGRAPHD_AUTOSTART": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, timeout=170, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    print(json.dumps(summary, indent=1))  # noqa: T201 - what was deployed, for whoever runs this
    assert {each for each in summary["failures"] if not each.startswith("daemon: ")} == set()
    return done.stdout, summary


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_first_compile_on_a_thread(tmp_path: Path, mode: str) -> None:
    """What stays in a thread's own storage aborts the interpreter at exit; PyTorch's trees leave such things."""
    printed, summary = run(ON_A_THREAD.format(mode=mode), tmp_path)

    assert printed == "False\n"
    assert summary["graphs"] == summary["deployed"]["GRAPH"] == 2
    assert summary["nodes_in_graphs"] >= 24


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("is_run_between", [False, True])
@pytest.mark.parametrize("profiles_before", [0, 1])
def test_a_second_profile_after_memory_has_gone_back(
    tmp_path: Path, mode: str, is_run_between: bool, profiles_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUPTI keeps records of the memory of copies and memsets in executables that are made once it is there: here those of `topk`."""
    monkeypatch.setenv("MALLOC_PERTURB_", "165")  # what is freed is of no more use, which shows at once
    program = PROFILED_TWICE.format(mode=mode, is_run_between=is_run_between, profiles_before=profiles_before)
    _, summary = run(program, tmp_path)

    assert summary["graphs"] == summary["deployed"]["GRAPH"] == 1
    assert summary["fallbacks"].get(PROFILED, 0) >= (48 if profiles_before or is_run_between else 0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_with_the_rules_all_of_a_graph_that_was_cut_is_captured(tmp_path: Path, mode: str) -> None:
    _, summary = run(CUT.format(mode=mode), tmp_path)

    assert summary["graphs"] == summary["deployed"]["GRAPH"] == 1
    assert summary["nodes_in_graphs"] >= 24
