"""`python -m tools.lab regions` and `addresses`: as `python -m benchmarks regions`, with processes that compile side by side."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.regions import Job, Record, measure_regions, run_job
from tools.lab.barrier import Barrier
from tools.lab.cpu_affinity import FULL_SPEED_VARIABLE
from tools.lab.processes import as_ended

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.workloads import Workload

CHILD = "tools.lab.shared_machine"


def measure_side_by_side(
    workloads: Sequence[Workload],
    ways: Sequence[str],
    repetitions: int,
    out: Path,
    caches: Path | None,
    what: str = "regions",
) -> list[Record]:
    """Measure as `measure_regions` does; the processes of a repetition compile side by side. `what`: `regions` or `addresses`."""
    with tempfile.TemporaryDirectory(prefix="pygraph-lab-", ignore_cleanup_errors=True) as folder:
        run_jobs = functools.partial(_side_by_side, folder=Path(folder), what=what)
        return measure_regions(workloads, ways, repetitions, out, caches, run_jobs)


def _side_by_side(jobs: Sequence[Job], folder: Path, what: str) -> Iterator[Record]:
    # All ways of a workload share their kernels, so that one of its processes compiles them.
    expected = [(job.name, job.workload.name) for job in jobs]
    barrier = Barrier(folder / f"barrier.{jobs[0].repetition}", expected)
    # One file for all repetitions: none is to begin with what a slow core takes for full speed.
    environ = {FULL_SPEED_VARIABLE: str(folder / "full-speed")}
    stop = threading.Event()
    with ThreadPoolExecutor(len(jobs)) as pool, contextlib.ExitStack() as stack:
        stack.callback(stop.set)  # the pool would wait for all of them
        for done in as_ended([pool.submit(_run, job, barrier, environ, stop, what) for job in jobs]):
            yield {**done.result(), "compiled_together": True}  # at once, as the run may be ended early


def _run(job: Job, barrier: Barrier, environ: Mapping[str, str], stop: threading.Event, what: str) -> Record:
    with barrier.place(job.name) as place:
        return run_job(job, (CHILD, what), {**environ, **place.environ}, stop)


def address_lines(records: Sequence[Record]) -> list[str]:
    """Return the lines to print for results of `addresses`."""
    lines = []
    for record in records:
        head = f"{record['workload']} {record['way']}"
        if "error" in record:
            lines.append(f"{head}: {record['error']}")
            continue
        steps = ", ".join(f"{name} {each['median']:.3f}" for name, each in record["addresses_ms"].items())
        lines += [
            f"{head} ms a step: {steps}",
            f"{head} beyond fixed addresses: {_shares(record['addresses_beyond_fixed'])}",
            f"{head} by its regions alone: {_shares(record['addresses_regions_beyond_fixed'])}",
        ]
    return lines


def _shares(figures: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{name} {each['median']:+.2%} (+-{each['mad']:.2%}, {each['n']:.0f})"
        for name, each in figures.items()
    )
