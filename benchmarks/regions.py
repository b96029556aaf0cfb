"""`python -m benchmarks regions`: host time, GPU time and memory of compiled regions, in PyTorch's own CUDA graphs, in ours, and launched.

Unlike `run`, this looks inside: each process stands where Inductor has regions captured, and runs them in one way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import region_table
from benchmarks.environment import TORCH_FIELDS, describe_host
from benchmarks.errors import UnknownNameError
from benchmarks.gate import Gate
from benchmarks.processes import as_ended, run_fresh
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.region_table import GRAPH, REDUCE_OVERHEAD, WAYS
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


DEFAULT_WAYS = (REDUCE_OVERHEAD, GRAPH)
_TIMEOUT_S = 500.0


@dataclass(frozen=True, slots=True)
class _Job:
    """One process to come."""

    workload: Workload
    way: str
    repetition: int
    caches: Path
    addresses: bool
    """Whether steps whose addresses alternate are timed, too: thousands of steps."""

    @property
    def name(self) -> str:
        """What no other process of the repetition is called."""
        return f"{self.workload.name}.{self.way}"


def measure_regions(
    workloads: Sequence[Workload],
    ways: Sequence[str] | None,
    repetitions: int,
    out: Path,
    caches: Path | None,
    *,
    together: bool = False,
    addresses: bool = True,
) -> list[str]:
    """Measure every workload in these ways, each in a fresh process; returns lines for people, writes all to `out`.

    `ways` None: those of `DEFAULT_WAYS`.
    `together`: the processes of a repetition compile side by side, and are measured one after the other.
    `addresses`: steps whose addresses alternate are timed, too.
    """
    if unknown := [way for way in ways or () if way not in WAYS]:
        raise UnknownNameError("way", unknown, list(WAYS))
    check_writable(out)
    records: list[dict[str, Any]] = []
    environment = describe_host()
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as folder:
        for repetition in range(repetitions):
            jobs = _jobs(workloads, ways, repetition, caches or Path(folder), addresses=addresses)
            for record in _together(jobs, Path(folder)) if together else map(_measure, jobs):
                seen = record.pop("environment", None)
                environment = {**dict.fromkeys(TORCH_FIELDS), **environment, **(seen or {})}
                records.append({**record, "compiled_together": together})
                write_json(out, {"schema": SCHEMA, "environment": environment, "records": records})
    return [*(line for record in records for line in _lines(record)), region_table.render(records)]


def _jobs(
    workloads: Sequence[Workload],
    ways: Sequence[str] | None,
    repetition: int,
    caches: Path,
    *,
    addresses: bool,
) -> list[_Job]:
    backwards = -1 if repetition % 2 else 1
    return [
        _Job(workload, way, repetition, caches, addresses)
        for workload in workloads
        for way in (ways or DEFAULT_WAYS)[::backwards]
    ]


def _together(jobs: Sequence[_Job], folder: Path) -> Iterator[dict[str, Any]]:
    gate = Gate(folder / f"gate.{jobs[0].repetition}", [(job.name, job.workload.name) for job in jobs])
    stop = threading.Event()
    with ThreadPoolExecutor(len(jobs)) as pool, contextlib.ExitStack() as stack:
        stack.callback(stop.set)  # the pool would wait for all of them
        for done in as_ended([pool.submit(_measure, job, gate, stop) for job in jobs]):
            yield done.result()  # at once, as the run may be ended early


def _measure(job: _Job, gate: Gate | None = None, stop: threading.Event | None = None) -> dict[str, Any]:
    if gate is None:
        return _run(job, {}, stop)
    with gate.place(job.name) as place:
        return _run(job, place.environ, stop)


def _run(job: _Job, more: Mapping[str, str], stop: threading.Event | None) -> dict[str, Any]:
    workload, way = job.workload, job.way
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        answer_file = Path(folder) / "answer.json"
        outcome = run_fresh(
            [
                "-m",
                "benchmarks.region_child",
                workload.name,
                way,
                str(answer_file),
                str(job.caches / "full-speed"),
                *(["addresses"] if job.addresses else []),
            ],
            {**region_environ(job.caches / workload.name), **more},
            _TIMEOUT_S,
            stop=stop,
        )
        answer = json.loads(answer_file.read_text()) if outcome.error is None else {"error": outcome.error}
    print(
        f"{workload.name} {way}: {outcome.error or 'done'} ({time.monotonic() - began:.0f} s)",
        file=sys.stderr,
        flush=True,
    )
    if outcome.error is not None:
        print(outcome.output[-3000:], file=sys.stderr, flush=True)
    return {"workload": workload.name, "way": way, "repetition": job.repetition + 1, **answer}


def region_environ(caches: Path) -> dict[str, str]:
    """Return the environment of a process: all share compiled kernels, so that they run the same ones."""
    return {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PYGRAPHD_HOME": str(caches.parent / "pygraphd"),  # where the compiled helper goes, for all of them
    }


def _lines(record: dict[str, Any]) -> list[str]:
    head = f"{record['workload']:20} {record['way']:15}"
    if "error" in record:
        return [f"{head} {record['error']}"]
    lines = [
        f"{head} {region['kind']:9} {region['inputs']:4} in {region['outputs']:4} out  "
        f"host {_figure(region['host_us'])} us{_moved(region['host_moved_us'])}  GPU {_figure(region['gpu_us'])} us  {_costs(region['recording'])}"
        f"{_again(region_table.again_ms(region))}"
        for region in record["regions"]
    ]
    clock = f"the GPU's clock {record['gpu_mhz']['median']:.0f} MHz" if record["gpu_mhz"] else ""
    reserved = (
        f"reserved {record['reserved_mb']:.0f} MB (first steps {record['first_steps_reserved_mb']:.0f})"
    )
    lines.append(f"{head} {reserved}, {clock}".rstrip(", "))
    if "addresses_ms" not in record:
        return lines
    steps = ", ".join(f"{name} {_figure(figure)}" for name, figure in record["addresses_ms"].items())
    return [
        *lines,
        f"{head} ms a step: {steps}",
        f"{head} beyond fixed addresses: {_shares(record['addresses_beyond_fixed'])}",
        f"{head} by its regions alone: {_shares(record['addresses_regions_beyond_fixed'])}",
    ]


def _shares(figures: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {each['median']:+.2%} (+-{each['mad']:.2%}, {each['n']})" for name, each in figures.items()
    )


def _moved(figure: dict[str, float] | None) -> str:
    return f" (moved: {figure['median']:.3f}, {figure['n']} calls)" if figure else ""


def _again(ms: float | None) -> str:
    """Say what a recording costs in a process that has made one."""
    return f"; recorded again in {ms:.0f} ms" if ms is not None else ""


def _figure(figure: dict[str, float] | None) -> str:
    return f"{figure['median']:.3f}" if figure else "-"


def _costs(recording: dict[str, float] | None) -> str:
    if not recording:
        return ""
    return ", ".join(f"{name} {value:g}" for name, value in recording.items())
