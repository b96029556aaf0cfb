"""Runs a user's program in a process of its own, with the hook on and every folder its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.warm_python import WarmPython

LIMIT_S = 600

# Matrix products alone: Inductor calls the library for them, and no C++ compiler takes its seconds.
TRAINING = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16, bias=False)
        self.second = torch.nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return self.second(self.first(x))

model = torch.compile(Model(){arguments})
model(torch.randn(3, 8)).sum().backward()
with torch.no_grad():
    model(torch.randn(3, 8))
"""


@dataclass(frozen=True)
class Outcome:
    """What a program left: its output, its summary, and the digests of the graphs in the spool, by kind."""

    output: str
    summary: dict[str, Any]
    graphs: dict[str, str]


class Run(Protocol):
    """See `run`."""

    def __call__(self, program: str, **environ: str) -> Outcome: ...


@pytest.fixture
def run(tmp_path: Path, warm_python: WarmPython) -> Run:
    """Return a function that runs a program without a daemon; environment variables may be added."""
    count = 0

    def run_once(program: str, **environ: str) -> Outcome:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        script = folder / environ.pop("SCRIPT", "program.py")
        script.write_text(textwrap.dedent(program))
        through = environ.pop("THROUGH", "").split()  # what stands between Python and the program
        variables = {
            **os.environ,
            "PYGRAPH": "1",
            "PYGRAPHD_HOME": str(folder / "home"),
            "PYGRAPHD_AUTOSTART": "0",
            "PYGRAPH_SUMMARY": str(folder / "summary.json"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            **environ,
        }
        if through:
            done = subprocess.run(
                [sys.executable, *through, script],
                env=variables,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
        else:
            done = warm_python.run([script], variables, folder, LIMIT_S)
        assert done.returncode == 0, done.stderr
        return Outcome(
            done.stdout, json.loads((folder / "summary.json").read_text()), digests(folder / "home")
        )

    return run_once


def digests(home: Path) -> dict[str, str]:
    """Return the graph digests of all spooled records, by kind."""
    requests = [json.loads(file.read_text()) for file in sorted((home / "spool").glob("*.json"))]
    graphs = [record["graph"] for request in requests for record in request["records"]]
    return {graph["kind"]: graph["digest"] for graph in graphs}
