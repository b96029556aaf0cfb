"""`python -m benchmarks regions`: host time, GPU time and memory of compiled regions, in PyTorch's own CUDA graphs, in PyGraph's, and as KERNELS.

Unlike `run`, this looks inside: each process stands where Inductor has a compiled region captured, and runs all regions in one way.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import TORCH_FIELDS, describe_host
from benchmarks.errors import UnknownNameError
from benchmarks.processes import run_fresh
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.region_table import GRAPH, REDUCE_OVERHEAD, WAYS
from benchmarks.trial import NOTHING_MORE
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Mapping, Sequence

DEFAULT_WAYS = (REDUCE_OVERHEAD, GRAPH)
_TIMEOUT_S = 500.0
_SHOWN_CHARACTERS = 3000

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A process to come; repetitions count from 0. Compiled code lies in `caches`, where others find it."""

    workload: Workload
    way: str
    repetition: int
    caches: Path

    @property
    def name(self) -> str:
        """A name that no other process of the repetition has."""
        return f"{self.workload.name}.{self.way}"


def run_job(
    job: Job,
    child: Sequence[str] = ("benchmarks.region_child",),
    environ: Mapping[str, str] = NOTHING_MORE,
    stop: threading.Event | None = None,
) -> Record:
    """Run a process with these variables too and return its record, in which an error may stand."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        answer_file = Path(folder) / "answer.json"
        arguments = ["-m", *child, job.workload.name, job.way, str(answer_file)]
        variables = {**region_environ(job.caches / job.workload.name), **environ}
        outcome = run_fresh(arguments, variables, _TIMEOUT_S, stop=stop)
        answer = json.loads(answer_file.read_text()) if outcome.error is None else {"error": outcome.error}
    took_s = time.monotonic() - began
    print(f"{job.name}: {outcome.error or 'done'} ({took_s:.0f} s)", file=sys.stderr, flush=True)
    if outcome.error is not None:
        # The end, where a traceback stands.
        print(outcome.output[-_SHOWN_CHARACTERS:], file=sys.stderr, flush=True)
    return {"workload": job.workload.name, "way": job.way, "repetition": job.repetition + 1, **answer}


def one_by_one(jobs: Sequence[Job]) -> Iterable[Record]:
    """Run jobs one after the other."""
    return map(run_job, jobs)


def measure_regions(
    workloads: Sequence[Workload],
    ways: Sequence[str],
    repetitions: int,
    out: Path,
    caches: Path | None,
    run_jobs: Callable[[Sequence[Job]], Iterable[Record]] = one_by_one,
) -> list[Record]:
    """Measure every workload in these ways, each in a fresh process; return the records, which are in `out` too.

    `run_jobs` runs the processes of one repetition.
    """
    if unknown := [way for way in ways if way not in WAYS]:
        raise UnknownNameError("way", unknown, list(WAYS))
    check_writable(out)
    records: list[Record] = []
    environment = {**dict.fromkeys(TORCH_FIELDS), **describe_host()}
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as folder:
        for repetition in range(repetitions):
            # A drift of the machine must not fall on one way alone.
            ordered = ways[::-1] if repetition % 2 else ways
            jobs = [
                Job(each, way, repetition, caches or Path(folder)) for each in workloads for way in ordered
            ]
            for record in run_jobs(jobs):
                environment |= record.pop("environment", {})
                records.append(record)
                write_json(out, {"schema": SCHEMA, "environment": environment, "records": records})
    return records


def region_environ(caches: Path) -> dict[str, str]:
    """Return the variables of a process: all share compiled kernels, so that they run the same ones."""
    return {
        **os.environ,
        # The child installs hooks of its own in Inductor, where PyGraph's must not be as well.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PYGRAPHD_HOME": str(caches.parent / "pygraphd"),  # the compiled helper lies there
    }
