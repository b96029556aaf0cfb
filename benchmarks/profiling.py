"""A profile of one step with `torch.profiler`, for its coverage. A failure becomes a remark, never an error.

It is the last thing that a process does: once CUPTI listens, no time that is taken is worth anything.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.coverage import Coverage, count

if TYPE_CHECKING:
    from benchmarks.timing import Stopwatch


def profile_step(watch: Stopwatch) -> tuple[Coverage | None, str]:
    """Return the coverage of one more step and a remark on it: its counts, or the reason if there is no coverage."""
    if watch.device.type != "cuda":
        return None, "no coverage: no GPU takes part"
    try:
        coverage = count(trace_step(watch))
    except Exception as error:  # noqa: BLE001 - what was measured so far is worth more than this figure
        return None, f"no coverage: {type(error).__name__}: {error}"
    return coverage, str(coverage) if coverage else "no coverage: the profiler saw no kernel"


def trace_step(watch: Stopwatch) -> list[dict[str, Any]]:
    """Return the events of a trace of one step, whose inputs were drawn before it."""
    # torch.profiler sets these itself only if graphs are on in Inductor's global options, where no mode of torch.compile
    # sets them. Without: graphs made before CUPTI is taken down and set up again may crash the process.
    os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    batches = [watch.draw() for _ in range(2)]
    watch.synchronize()  # drawing is no part of a step
    with tempfile.TemporaryDirectory(prefix="pygraph-trace-") as folder:
        file = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            acc_events=True,  # it warns otherwise that there is one cycle only
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
        ) as profiler:
            for inputs in batches:  # the first step is not kept: it sets CUPTI up
                watch.step(inputs)
                watch.synchronize()
                profiler.step()
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events
