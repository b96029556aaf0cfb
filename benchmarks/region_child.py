"""`python -m benchmarks.region_child WORKLOAD WAY ANSWER_FILE`: time and memory of the calls of each compiled region, in this process.

Each region is wrapped where Inductor has it captured. So Dynamo, autograd and the optimizer are outside of the timed part.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.child import describe, find_device, reserved_mb, wake, write_answer
from benchmarks.conditions import Conditions
from benchmarks.errors import BenchmarkError
from benchmarks.figures import summarize
from benchmarks.region_table import GRAPH, REDUCE_OVERHEAD
from benchmarks.step import Step
from benchmarks.variants import Compile
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.case import Case, Inputs
from pygraphd.client.analysis.graph_facts import GraphFacts, facts_of
from pygraphd.client.backend import driver, torch_private
from pygraphd.client.common.report import Report
from pygraphd.client.recording.attention_host import make_recordings
from pygraphd.client.recording.capture import CudaRecorder
from pygraphd.client.recording.recordings import Recordings
from pygraphd.client.replay.native.ffi import helper
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Sequence

WARM_UP = 40
STEPS = 60
BLOCK = 10
"""Steps that are taken again together, if the conditions ask for it."""
_BUSY_CYCLES = 60_000_000
"""About 30 ms: longer than the host takes to issue any of these steps, so that the GPU never waits for it."""

Runnable = Callable[[list[Any]], Any]


@dataclass(slots=True)
class Timed:
    """A region, and the times of its calls. `call` is `first`, `on_host`, `on_gpu`, or `run` itself."""

    run: Runnable
    kind: str
    relocatable: Recordings | None
    report: Report = field(default_factory=Report)
    recording_ms: float = 0.0
    inputs: int = 0
    outputs: int = 0
    block_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    call: Runnable = field(init=False)

    def __post_init__(self) -> None:
        self.call = self.first

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        return self.call(inputs)

    def first(self, inputs: list[Any]) -> Any:
        """Run a call of warm-up."""
        self.inputs, before_ms = len(inputs), self.report.recording_ms
        result = self.run(inputs)
        self.outputs = len(result)
        self.recording_ms += self.report.recording_ms - before_ms
        return result

    def on_host(self, inputs: list[Any]) -> Any:
        """Run a call, and add the host's time to the block."""
        # The attribute is read before the clock starts.
        run = self.run
        began = time.perf_counter_ns()
        result = run(inputs)
        self.block_us.append((time.perf_counter_ns() - began) / 1e3)
        return result

    def on_gpu(self, inputs: list[Any]) -> Any:
        """Run a call between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = self.run(inputs)
        end.record()
        self.spans.append((begin, end))
        return result

    def figures(self) -> dict[str, Any]:
        """Return the region's figures; the GPU must be idle."""
        return {
            "kind": self.kind,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "host_us": as_json(self.host_us),
            "gpu_us": as_json([begin.elapsed_time(end) * 1e3 for begin, end in self.spans]),
            "recording": {"recording_ms": self.recording_ms} if self.relocatable is not None else None,
        }


@dataclass(slots=True)
class Regions:
    """All regions of this process, run in one way."""

    way: str
    report: Report = field(default_factory=Report)
    all: list[Timed] = field(default_factory=list)
    recorder: CudaRecorder | None = None
    outputs: Iterator[GraphFacts] = field(default_factory=lambda: iter(()))

    def install(self) -> Callable[[], object]:
        """Replace or surround PyTorch's CUDA graphs; return a function that undoes it."""
        undo = [torch_private.install(self._around_post_compile, self._around_cudagraphify)]
        if self.way == GRAPH:
            # Facts that the hook has from its graph pass: what is saved for the backward, and what is donated to it.
            undo.append(torch_private.add_pass(_keep_code, ()))
        # In reverse, as each surrounds what was there before it.
        return lambda: [remove() for remove in reversed(undo)]

    def _around_post_compile(
        self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]
    ) -> None:
        if self.way != REDUCE_OVERHEAD:
            # For a backward that Inductor does not capture, it asserts that PyTorch's CUDA graph trees know
            # the forward. Here they do not.
            torch_private.note_ours(graph_kwargs.get("boxed_forward_device_index"))
        if self.way == GRAPH:  # as the hook does
            facts = torch_private.facts(compiled, graph_kwargs)
            told = facts_of(facts) or GraphFacts(
                is_repeatable=facts.is_repeatable, is_vouched=facts.is_vouched
            )
            # Taken one by one: Inductor has partitions captured in their order.
            self.outputs = (told.of_partition(facts.maps, part) for part in range(facts.partitions))
        original()
        if self.way != REDUCE_OVERHEAD:
            # In this mode Inductor leaves misaligned inputs to the trees, which are not there in the other
            # ways.
            torch_private.align_inputs(compiled)

    def _around_cudagraphify(self, original: Any, runnable: Runnable, kwargs: Mapping[str, Any]) -> Any:
        kind = "backward" if kwargs["is_backward"] else "inference" if kwargs["is_inference"] else "forward"
        relocatable = None
        run = runnable
        if self.way == REDUCE_OVERHEAD:
            run = original(runnable, **kwargs)
        elif self.way == GRAPH:
            # One recorder: graphs that draw random numbers wait for each other.
            self.recorder = self.recorder or CudaRecorder(driver.load(), kwargs["device_index"])
            run = relocatable = make_recordings(runnable, self.recorder, self.report, next(self.outputs))
        self.all.append(Timed(run, kind, relocatable, self.report))
        return self.all[-1]

    def time_calls(self, manner: Callable[[Timed], Runnable]) -> None:
        """Have the calls of all regions be timed in this manner from now on."""
        for each in self.all:
            each.call = manner(each)


def measure(workload_name: str, way: str, conditions: Conditions) -> dict[str, Any]:
    """Run a workload and return its figures."""
    program = prepare(workload_name, way, conditions)
    regions, device = program.regions, program.device
    reserved_first = reserved_mb(device)
    # Recording and verification have a peak of their own, which is the other figure.
    torch.cuda.reset_peak_memory_stats(device)
    regions.time_calls(lambda region: region.on_host)
    for _ in range(STEPS // BLOCK):
        blocks = conditions.timed(program.host_block)
        for region, times_us in zip(regions.all, blocks, strict=True):
            region.host_us += times_us
    torch.cuda.synchronize()
    reserved = reserved_mb(device)
    regions.time_calls(lambda region: region.on_gpu)
    sleeps = []
    for _ in range(STEPS // 2):
        inputs = program.draw()
        torch.cuda.synchronize()
        sleeps.append(_keep_busy())
        program.step(inputs)
        del inputs
    torch.cuda.synchronize()
    return {
        "reserved_mb": reserved,
        "first_steps_reserved_mb": reserved_first,
        "gpu_mhz": clock_mhz([begin.elapsed_time(end) for begin, end in sleeps]),
        "regions": [each.figures() for each in regions.all],
        "counts": dict(regions.report.counts),
        "fallbacks": dict(regions.report.fallbacks),
        "note": conditions.note(),
        "environment": describe(device),
    }


@dataclass(frozen=True, slots=True)
class Program:
    """A workload in steady state, whose regions are run in one way."""

    device: torch.device
    case: Case
    step: Step
    regions: Regions
    draw: Callable[[], Inputs]

    def host_block(self) -> list[list[float]]:
        """Run a block of steps, nothing being queued at the beginning of each; return the host's times of each region in us."""
        for each in self.regions.all:
            each.block_us = []
        for _ in range(BLOCK):
            inputs = self.draw()
            torch.cuda.synchronize()
            self.step(inputs)
        return [each.block_us for each in self.regions.all]


def prepare(workload_name: str, way: str, conditions: Conditions) -> Program:
    """Compile a workload and run its first steps, in which its regions are recorded."""
    device = find_device("cuda")
    torch.manual_seed(0)
    with device:
        case = WORKLOADS[workload_name].build(device)
    generator = torch.Generator(device).manual_seed(0)
    wake(device)
    conditions.before_compiling()
    regions = Regions(way)
    # Without the helper nothing is recorded.
    have_helper()
    regions.install()
    step = Step(case, device, Compile.REDUCE_OVERHEAD)
    step(case.draw(generator))
    torch.cuda.synchronize()
    conditions.before_timing()
    for _ in range(WARM_UP):
        step(case.draw(generator))
    torch.cuda.synchronize()
    for each in regions.all:
        if each.relocatable is not None:
            each.run = each.relocatable.run  # as a partition's slot holds it once GRAPH is deployed
    return Program(device, case, step, regions, lambda: case.draw(generator))


def _keep_code(_graph: torch.fx.Graph) -> None:
    """A graph pass that changes nothing, so that all ways run the same kernels."""


def _keep_busy() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Have the GPU count cycles for about 30 ms; return events whose distance tells its clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    # Nothing public in torch has the GPU wait. It counts cycles, whose time shows the clock's rate.
    torch.cuda._sleep(_BUSY_CYCLES)
    end.record()
    return begin, end


def clock_mhz(sleeps_ms: Sequence[float]) -> dict[str, float] | None:
    """Return the clock of a GPU that takes these times to count `_BUSY_CYCLES`."""
    return as_json([_BUSY_CYCLES / (ms * 1e3) for ms in sleeps_ms])


def as_json(samples: Sequence[float]) -> dict[str, float] | None:
    """Return the figure for some samples, as it is written to files."""
    figure = summarize(samples)
    return dataclasses.asdict(figure) if figure else None


def have_helper() -> None:
    """Have PyGraph's compiled helper; raises BenchmarkError if it cannot be compiled."""
    if reason := helper.prepare(locate().cache):
        raise BenchmarkError(f"no compiled helper: {reason}")


def main(arguments: list[str], conditions: Conditions | None = None) -> int:
    """Measure the workload of the first argument in the way of the second, and write the answer to the file of the third."""
    workload, way, answer_file = arguments
    return write_answer(answer_file, lambda: measure(workload, way, conditions or Conditions()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
