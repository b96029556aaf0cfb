"""A program that records with `PYGRAPH_MEMORY` does not reserve more memory beside its own than that."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.recording.budget import OVER_LIMIT
from pygraphd.schema.sizes import parse_size
from tests.support.rank_processes import environ, ours, summary

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROGRAM = """
import json, sys
import torch

def step(x, w):
    y = torch.tanh(x @ w)
    return torch.sin(y @ w) @ w + y

with torch.no_grad():
    x, w = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    run = torch.compile(step, mode="reduce-overhead", dynamic=False)
    right = run(x, w)
    equal = [torch.equal(run(x, w), right) for _ in range(2)]  # as KERNELS: what the program itself takes
    before = torch.cuda.max_memory_reserved()
    equal += [torch.equal(run(x, w), right) for _ in range(60)]
    torch.cuda.synchronize()
json.dump({"more": torch.cuda.max_memory_reserved() - before, "equal": all(equal)}, open(sys.argv[1], "w"))
"""
"""A tensor has 64 MiB, and a call allocates three of them. Without a limit, recording it reserves about 200 MiB more than the calls do."""


@pytest.mark.parametrize(("limit", "is_recorded"), [("64MiB", False), ("128MiB", False), ("1GiB", True)])
def test_recording_reserves_no_more_than_the_setting_allows(
    tmp_path: Path, limit: str, is_recorded: bool
) -> None:
    """With segments that expand, captures have memory of their own, and PyTorch reserves hardly more than is allocated."""
    program, result = tmp_path / "program.py", tmp_path / "result.json"
    program.write_text(PROGRAM)
    more = {"PYGRAPH_MEMORY": limit, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    done = subprocess.run(
        [sys.executable, program, result],
        env=environ(tmp_path, **more, **ours(tmp_path)),
        timeout=115,
        check=False,
    )

    assert done.returncode == 0
    said, measured = summary(tmp_path), json.loads(result.read_text())
    assert measured["equal"]
    assert measured["more"] <= parse_size(limit)
    memory = said["memory"]
    assert memory["limit_bytes"] == parse_size(limit)
    assert said["captured"] == is_recorded
    assert (memory["peak_requested_bytes"] <= memory["limit_bytes"]) == is_recorded
    assert (memory["refused_recordings"] == 0) == is_recorded
    assert (OVER_LIMIT in said["fallbacks"]) != is_recorded
