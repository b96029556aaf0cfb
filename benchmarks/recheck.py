"""`python -m benchmarks recheck`: what it costs that deployed graphs are timed again now and then.

The looks follow each other far more closely than they do for users, so that there are enough of them to measure; the share of
a run's time is worked out for the usual distance. Nothing changes meanwhile, so that what is measured anew is a false alarm, or
comes in its turn (`client.retrials`), which here does not wait until the program has run for long enough.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.figures import summarize
from benchmarks.processes import run_fresh
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.trial import product_environment
from pygraphd.client.options import RECHECK, RECHECK_S
from pygraphd.client.retrials import FIRST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Workload

LOOK_S = 0.25
"""Distance of the looks here."""
MAX_SHARE = 1e-3
"""Of a run's time, for users: more is too much."""
RUN_S = 6.0
WARM_UP = 80
_TIMEOUT_S = 300.0


def measure_recheck(workloads: Sequence[Workload], repetitions: int, out: Path) -> list[dict[str, Any]]:
    """Run each workload in fresh processes; returns a record for each, writes all to `out`."""
    check_writable(out)
    records: list[dict[str, Any]] = []
    environment = describe_host()
    for workload in workloads:
        records.append(_record(workload, repetitions))
        # At once: the run may be ended before the next.
        write_json(out, {"schema": SCHEMA, "environment": environment, "records": records})
    return records


def _record(workload: Workload, repetitions: int) -> dict[str, Any]:
    summaries = [_run(workload) for _ in range(repetitions)]
    each_ms = [summary["checking_ms"] / summary["rechecked"] for summary in summaries]
    figure = summarize(each_ms)
    assert figure is not None
    graphs = summaries[0]["graphs"]
    return {
        "workload": workload.name,
        "graphs": graphs,
        "looks": [summary["rechecked"] for summary in summaries],
        "drifted": [summary["drifted"] for summary in summaries],
        "retried": [summary["retried"] for summary in summaries],
        "look_ms": {"median": figure.median, "mad": figure.mad, "n": figure.n},
        "measuring_ms": [round(_measuring_ms(summary), 3) for summary in summaries],
        "interval_s": RECHECK_S,
        "share": _share(graphs, summaries),
    }


def _share(graphs: int, summaries: Sequence[dict[str, Any]]) -> float:
    """Return the part of a user's time that goes into looks at all graphs, and into measuring anew what has not changed.

    What is measured anew in its turn is counted as it is in the first hour, where it is most often.
    """
    looks = sum(summary["rechecked"] for summary in summaries)
    if not looks:
        raise BenchmarkError(
            "nothing was looked at again: see why in `reasons` and `failures` of the summary"
        )
    looking_ms = sum(summary["checking_ms"] for summary in summaries)
    alarms_ms = sum(summary["drifted"] * _measuring_ms(summary) for summary in summaries)
    retrial_ms = max(_measuring_ms(each) if each["retried"] else 0.0 for each in summaries)
    a_look_ms = (looking_ms + alarms_ms) / looks + retrial_ms / FIRST
    return float(graphs * a_look_ms / (RECHECK_S * 1e3))


def _measuring_ms(summary: dict[str, Any]) -> float:
    """Return what it costs to measure one graph."""
    return float(summary["measuring_ms"] / max(1, summary["measured"]))


def _run(workload: Workload) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        home = Path(folder)
        environ = {
            **product_environment(os.environ, home, home / "home", home / "summary.json"),
            RECHECK: str(LOOK_S),
        }
        outcome = run_fresh(["-m", "benchmarks.recheck", workload.name], environ, _TIMEOUT_S)
        if outcome.error:
            raise BenchmarkError(outcome.error)
        summary: dict[str, Any] = json.loads((home / "summary.json").read_text())
    if not summary["rechecked"]:
        raise BenchmarkError(f"{workload.name}: no graph was looked at; is there a CUDA device?")
    return summary


def is_too_much(record: dict[str, Any]) -> bool:
    """Whether looking at this workload takes more of a user's time than it may."""
    return bool(record["share"] > MAX_SHARE)


def line(record: dict[str, Any]) -> str:
    """Return a record for people."""
    return (
        f"{record['workload']:20} {record['graphs']} graphs, looks {record['looks']}, drifted {record['drifted']}, in turn {record['retried']}: "
        f"{record['look_ms']['median']:.3f} ms for each, {record['share']:.2e} of the time at {record['interval_s']:.0f} s"
        f"{f', more than {MAX_SHARE:.0e}' if is_too_much(record) else ''}"
    )


def _child(name: str) -> None:
    """Run a workload for some time, in this process alone."""
    import torch

    from benchmarks.child import find_device
    from benchmarks.peers import Compile
    from benchmarks.step import Step
    from benchmarks.workloads import WORKLOADS
    from pygraphd.client import retrials

    retrials.SHARE = math.inf  # a user's program has run for an hour by then
    retrials.stagger = lambda: 0
    device = find_device("cuda")
    with device:
        case = WORKLOADS[name].build(device)
    generator = torch.Generator(device).manual_seed(0)
    step = Step(case, device, Compile.REDUCE_OVERHEAD)
    for _ in range(WARM_UP):
        step(case.draw(generator))
    ends = time.monotonic() + RUN_S
    while time.monotonic() < ends:
        step(case.draw(generator))
    torch.cuda.synchronize()


if __name__ == "__main__":
    try:
        _child(sys.argv[1])
    except BenchmarkError as error:
        sys.exit(str(error))  # without the traceback, whose last line begins with the class
