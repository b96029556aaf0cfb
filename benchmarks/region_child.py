"""`python -m benchmarks.region_child WORKLOAD WAY ANSWER_FILE SPEED_FILE`: what a call of each compiled region costs, in this process alone.

Stands where Inductor has its regions captured, so that everything around a region (Dynamo, autograd, the
optimiser) is outside of what is timed, and the same for all ways of running it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import addresses
from benchmarks.addresses import Addresses
from benchmarks.child import describe, find_device, reserved_mb, wake
from benchmarks.cores import Cores
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Figure, summarize
from benchmarks.gate import wait_for_turn, wait_to_compile
from benchmarks.region_table import GRAPH, REDUCE_OVERHEAD
from benchmarks.step import Step
from benchmarks.variants import Compile
from benchmarks.workloads import WORKLOADS
from pygraphd.client.analysis.graph_facts import GraphFacts, facts_of
from pygraphd.client.backend import driver, torch_private
from pygraphd.client.common.report import Report
from pygraphd.client.recording.attention_host import make_recordings
from pygraphd.client.recording.capture import CudaRecorder
from pygraphd.client.replay.native.ffi import helper
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads.case import Case
    from pygraphd.client.recording.recordings import Recordings

WARM_UP = 40
STEPS = 60
BLOCK = 10
"""Steps that are taken again together if the host was slow."""
_COMPILER_S = 60.0
_MIB = 2**20
_STEPS_THAT_RECORD = 5
"""Sizes are launched once, then recorded."""
_BUSY_CYCLES = 60_000_000
"""About 30 ms: longer than the host takes to issue any of these steps, so that the GPU never waits for it."""

Runnable = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class RegionFigures:
    """One region: time of the host in a call with nothing queued, and span on the GPU with the queue full."""

    kind: str
    inputs: int
    outputs: int
    host_us: Figure | None
    host_moved_us: Figure | None
    """Of those calls for which nodes had to be written; they are in `host_us`, too."""
    gpu_us: Figure | None
    first_calls_ms: list[float]
    """The first calls on the host's clock: compiling kernels, recording and verifying are among them."""
    recording: dict[str, float] | None


class Timed:
    """A region and the times of its calls."""

    def __init__(self, run: Runnable, kind: str, relocatable: Recordings | None) -> None:
        self.run = run
        self.kind = kind
        self.relocatable = relocatable
        self.inputs = self.outputs = 0
        self.first_calls_ms: list[float] = []
        self.host_us: list[float] = []
        self.host_moved_us: list[float] = []
        self.total_us = 0.0
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.call: Runnable = self._first

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        return self.call(inputs)

    def _first(self, inputs: list[Any]) -> Any:
        self.inputs = len(inputs)
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        result = self.run(inputs)
        torch.cuda.synchronize()
        self.first_calls_ms.append((time.perf_counter_ns() - began) / 1e6)
        self.outputs = len(result)
        return result

    def _on_host(self, inputs: list[Any]) -> Any:
        run = self.run
        written = self._written()
        began = time.perf_counter_ns()
        result = run(inputs)
        elapsed_us = (time.perf_counter_ns() - began) / 1e3
        self.host_us.append(elapsed_us)
        if self._written() > written:
            self.host_moved_us.append(elapsed_us)
        return result

    def _written(self) -> int:
        """Return how many nodes were written so far because something had moved."""
        replays = self.relocatable.replays if self.relocatable is not None else ()
        return sum(replay.counts.written for replay in replays)

    def _in_total(self, inputs: list[Any]) -> Any:
        began = time.perf_counter_ns()
        result = self.run(inputs)
        self.total_us += (time.perf_counter_ns() - began) / 1e3
        return result

    def _on_gpu(self, inputs: list[Any]) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = self.run(inputs)
        end.record()
        self.spans.append((begin, end))
        return result

    def figures(self) -> RegionFigures:
        """Return what was measured; the GPU must be done."""
        return RegionFigures(
            kind=self.kind,
            inputs=self.inputs,
            outputs=self.outputs,
            host_us=summarize(self.host_us),
            host_moved_us=summarize(self.host_moved_us),
            gpu_us=summarize([begin.elapsed_time(end) * 1e3 for begin, end in self.spans]),
            first_calls_ms=[round(ms, 3) for ms in self.first_calls_ms[:8]],
            recording=_recording(self.relocatable),
        )


def _recording(relocatable: Recordings | None) -> dict[str, float] | None:
    if relocatable is None:
        return None
    replays = relocatable.replays
    counts = {
        "recordings": len(replays),
        "executables": sum(replay.executables for replay in replays),
        **{
            name: sum(getattr(replay.counts, name) for replay in replays)
            for name in ("replays", "relocated", "written")
        },
    }
    return {**(_costs(relocatable) or {}), **counts}


def _costs(relocatable: Recordings | None) -> dict[str, float] | None:
    """Return what the latest recording came to."""
    costs = relocatable.costs if relocatable is not None else None
    return dataclasses.asdict(costs) if costs else None


@dataclass(slots=True)
class Regions:
    """All regions of this process, run in one way."""

    way: str
    report: Report = field(default_factory=Report)
    all: list[Timed] = field(default_factory=list)
    recorders: dict[int, CudaRecorder] = field(default_factory=dict)
    outputs: Iterator[GraphFacts] = field(default_factory=lambda: iter(()))

    def install(self) -> Callable[[], None]:
        """Take the place of PyTorch's own CUDA graphs, or surround them; return what undoes that."""
        return torch_private.install(self._around_post_compile, self._around_cudagraphify)

    def _around_post_compile(
        self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]
    ) -> None:
        if self.way != REDUCE_OVERHEAD:
            torch_private.note_ours(graph_kwargs.get("boxed_forward_device_index"))
        if self.way != GRAPH:
            original()
        else:
            self._relocate(original, compiled, graph_kwargs)
        if self.way != REDUCE_OVERHEAD:
            compiled.current_callable = torch_private.aligned(compiled, compiled.current_callable)

    def _relocate(self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        """Do what the hook does."""
        facts = torch_private.facts(compiled, graph_kwargs)
        told = facts_of(facts) or GraphFacts(is_repeatable=facts.is_repeatable, is_vouched=facts.is_vouched)
        self.outputs = (told.of_partition(facts.maps, part) for part in range(facts.partitions))
        original()

    def _around_cudagraphify(self, original: Any, runnable: Runnable, kwargs: Mapping[str, Any]) -> Any:
        kind = "backward" if kwargs["is_backward"] else "inference" if kwargs["is_inference"] else "forward"
        relocatable = None
        run = runnable
        if self.way == REDUCE_OVERHEAD:
            run = original(runnable, **kwargs)
        elif self.way == GRAPH:
            recorder = self._recorder(kwargs["device_index"])
            run = relocatable = make_recordings(runnable, recorder, self.report, next(self.outputs))
        self.all.append(Timed(run, kind, relocatable))
        return self.all[-1]

    def _recorder(self, device_index: int) -> CudaRecorder:
        """Return the one of a device: graphs that draw random numbers wait for each other."""
        if device_index not in self.recorders:
            self.recorders[device_index] = CudaRecorder(driver.load(), device_index)
        return self.recorders[device_index]

    def forget_recordings(self) -> None:
        """Have every region be recorded again: without what a process does once."""
        for each in self.all:
            if each.relocatable is not None:
                for slot in list(each.relocatable._slots.values()):
                    each.relocatable.let_go_at(slot.size)

    def forget_since(self, counts: Sequence[tuple[int, int]]) -> None:
        """Forget the host's times but for these first ones of each region; see `counts`."""
        for each, (calls, moved) in zip(self.all, counts, strict=True):
            del each.host_us[calls:], each.host_moved_us[moved:]

    def counts(self) -> list[tuple[int, int]]:
        """Return how many of the host's times there are of each region, and how many of these with something moved."""
        return [(len(each.host_us), len(each.host_moved_us)) for each in self.all]

    def total_us(self) -> float:
        """Return what calls that were timed in total have taken of the host's time."""
        return sum(each.total_us for each in self.all)

    def switch(self, name: str) -> None:
        """Have all calls be timed in this manner from now on."""
        for each in self.all:
            each.call = each.run if name == "" else getattr(each, name)


def measure(workload_name: str, way: str, full_speed: Path, *, with_addresses: bool) -> dict[str, Any]:
    """Run a workload and return its figures; `full_speed` is the file of `benchmarks.cores`."""
    device = find_device("cuda")
    workload = WORKLOADS[workload_name]
    torch.manual_seed(0)
    with device:
        case = workload.build(device)
    generator = torch.Generator(device).manual_seed(0)
    wake(device)
    wait_to_compile()
    regions = Regions(way)
    have_helper()
    regions.install()
    step = Step(case, device, Compile.REDUCE_OVERHEAD)
    step(case.draw(generator))
    torch.cuda.synchronize()
    wait_for_turn()
    for _ in range(WARM_UP):
        step(case.draw(generator))
    torch.cuda.synchronize()
    peak = reserved_mb(device)
    torch.cuda.reset_peak_memory_stats(device)
    regions.switch("_on_host")
    cores = Cores(full_speed)
    for _ in range(STEPS // BLOCK):
        cores.undisturbed(functools.partial(_run_on_host, regions, regions.counts(), step, case, generator))
    torch.cuda.synchronize()
    reserved = reserved_mb(device)
    regions.switch("_on_gpu")
    sleeps = []
    for _ in range(STEPS // 2):
        inputs = case.draw(generator)
        torch.cuda.synchronize()
        sleeps.append(_keep_busy())
        step(inputs)
        del inputs
    torch.cuda.synchronize()
    figures = [dataclasses.asdict(each.figures()) for each in regions.all]
    of_addresses = _addresses(regions, step, case, generator, cores) if with_addresses else {}
    regions.switch("")
    regions.forget_recordings()
    for _ in range(_STEPS_THAT_RECORD):
        step(case.draw(generator))
    return {
        "reserved_mb": reserved,
        "first_steps_reserved_mb": peak,
        "gpu_mhz": clock_mhz([begin.elapsed_time(end) for begin, end in sleeps]),
        "regions": [
            {**figure, "recorded_again": _costs(each.relocatable)}
            for figure, each in zip(figures, regions.all, strict=True)
        ],
        **of_addresses,
        "counts": dict(regions.report.counts),
        "launched": dict(regions.report.fallbacks),
        "timings": cores.timings,
        "disturbed": cores.disturbed,
        "environment": describe(device),
    }


def _keep_busy() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Have the GPU count cycles for a while; how long that takes says what its clock is."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(_BUSY_CYCLES)
    end.record()
    return begin, end


def clock_mhz(sleeps_ms: Sequence[float]) -> dict[str, float] | None:
    """Return the clock of a GPU that takes so long to count `_BUSY_CYCLES`, as it is written to files."""
    found = summarize([_BUSY_CYCLES / (ms * 1e3) for ms in sleeps_ms])
    return dataclasses.asdict(found) if found else None


def _addresses(
    regions: Regions, step: Step, case: Case, generator: torch.Generator, cores: Cores
) -> dict[str, Any]:
    """Time steps whose addresses stay, and steps whose addresses alternate."""
    regions.switch("_in_total")
    windows = Addresses(step, [case.draw(generator) for _ in range(4)], cores, regions.total_us)
    # PyTorch refuses two forwards in flight: the first's outputs would be overwritten.
    may_overlap = regions.way != REDUCE_OVERHEAD
    return addresses.figures(
        windows.rounds(windows.ways(training=case.optimizer is not None, may_overlap=may_overlap))
    )


def _run_on_host(
    regions: Regions, before: Sequence[tuple[int, int]], step: Step, case: Case, generator: torch.Generator
) -> None:
    """Add a block of steps to what there was before."""
    regions.forget_since(before)
    for _ in range(BLOCK):
        inputs = case.draw(generator)
        torch.cuda.synchronize()
        step(inputs)


def have_helper() -> None:
    """Have what PyGraph compiles be there: it is compiled once for each user, and this process may be the first."""
    if reason := helper.prepare(locate().cache):
        raise BenchmarkError(f"no compiled helper: {reason}")
    if not helper.wait(_COMPILER_S):
        raise BenchmarkError("the C compiler did not end: look at what it says beside the cache")


def main(arguments: list[str]) -> int:
    """Measure the workload of the first argument in the way of the second, into the file of the third; with `addresses` these, too."""
    workload, way, answer_file, full_speed, *more = arguments
    try:
        answer = measure(workload, way, Path(full_speed), with_addresses="addresses" in more)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    Path(answer_file).write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
