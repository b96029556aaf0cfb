"""`python -m tools.lab memory WORKLOAD`: reserved GPU memory in steady state by pool, segment class and owner, for each way of running regions.

Unlike `run`, this looks inside, as `regions` does: one fresh process a way, all with the same compiled kernels.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import TORCH_FIELDS, describe_host
from benchmarks.errors import BenchmarkError, UnknownNameError
from benchmarks.processes import run_fresh
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.region_table import WAYS
from benchmarks.regions import region_environ

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Workload

_TIMEOUT_S = 300.0

Answer = dict[str, Any]
"""The answer of a process for one way, or its `error`."""


def measure_memory(workload: Workload, ways: Sequence[str], out: Path | None) -> list[Answer]:
    """Run the workload in each way, in a process of its own; all goes to `out` after each."""
    if unknown := [way for way in ways if way not in WAYS]:
        raise UnknownNameError("way", unknown, list(WAYS))
    if out is not None:
        check_writable(out)
    if reason := missing_device():
        raise BenchmarkError(f"{reason}: there is no GPU memory to look at")
    answers: list[Answer] = []
    environment = {**dict.fromkeys(TORCH_FIELDS), **describe_host()}
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as folder:
        for way in ways:
            answer = _measure(workload, way, Path(folder))
            environment |= answer.pop("environment", {})
            answers.append(answer)
            if out is not None:
                # Not `records`: those who read files of `regions` would take it for one.
                content = {"environment": environment, "workload": workload.name, "ways": answers}
                write_json(out, {"schema": SCHEMA, **content})
    return answers


def missing_device() -> str | None:
    """Return why nothing can be measured here; None if there is a device. No context is made on it."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed here"
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device here"


def _measure(workload: Workload, way: str, folder: Path) -> Answer:
    began = time.monotonic()
    answer_file = folder / f"{way}.json"
    outcome = run_fresh(
        ["-m", "tools.lab.memory_child", workload.name, way, str(answer_file)],
        region_environ(folder / workload.name),
        _TIMEOUT_S,
    )
    took_s = time.monotonic() - began
    print(f"{workload.name} {way}: {outcome.error or 'done'} ({took_s:.0f} s)", file=sys.stderr, flush=True)
    if outcome.error is not None:
        print(outcome.output[-3000:], file=sys.stderr, flush=True)
        return {"way": way, "error": outcome.error}
    return {"way": way, **json.loads(answer_file.read_text())}
