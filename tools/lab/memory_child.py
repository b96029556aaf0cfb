"""`python -m tools.lab.memory_child WORKLOAD WAY ANSWER_FILE`: the allocator's memory in steady state, in this process.

Steps are those of `regions`, whose reserved memory this is to explain: each draws its inputs while the last ones are still held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.child import describe, find_device, wake, write_answer
from benchmarks.region_child import Regions, have_helper
from benchmarks.step import Step
from benchmarks.variants import Compile
from benchmarks.workloads import WORKLOADS
from tools.lab.memory_marks import BACKWARD, BEFORE, FORWARD, OPTIMISER, Reading, most, over_steps, reading
from tools.lab.recording_memory import footprint_of
from tools.lab.snapshot import Owners, brief, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.region_child import Timed
    from benchmarks.workloads.case import Case, Inputs
    from pygraphd.client.replay.replay import Replay
    from tools.lab.snapshot import Segment

WARM_UP = 40
STEPS = 20


class Allocator(Protocol):
    """The allocator of a device."""

    def read(self) -> Mapping[str, int]:
        """Return its statistics, and begin to look for another most."""

    def snapshot(self) -> Sequence[Segment]:
        """Return all segments."""

    def used(self) -> int:
        """Return the bytes in use on the device, contexts, graphs and other processes included."""


@dataclass(frozen=True, slots=True)
class OfCuda:
    """PyTorch's for a CUDA device."""

    device: torch.device

    def read(self) -> Mapping[str, int]:  # noqa: D102 - see the protocol
        stats: Mapping[str, int] = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return stats

    def snapshot(self) -> Sequence[Segment]:  # noqa: D102
        # A snapshot has the segments of all devices.
        index = torch.cuda.current_device()
        return [each for each in torch.cuda.memory_snapshot() if each["device"] == index]

    def used(self) -> int:  # noqa: D102
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


def measure(workload_name: str, way: str, device: torch.device, allocator: Allocator) -> dict[str, Any]:
    """Run a workload and return its memory."""
    torch.manual_seed(0)
    with device:
        case = WORKLOADS[workload_name].build(device)
    generator = torch.Generator(device).manual_seed(0)
    wake(device)
    regions = Regions(way)
    with contextlib.ExitStack() as stack:
        stack.callback(regions.install())
        # In each way: Inductor hands over its graphs to be captured only in a mode with CUDA graphs.
        step = Step(case, device, Compile.REDUCE_OVERHEAD)
        look = Look(allocator, case, step, regions)
        warm_up = [_warm_up(step, case.draw(generator), allocator) for _ in range(WARM_UP)]
        regions.time_calls(lambda region: region.run)
        for number in range(STEPS):
            inputs = case.draw(generator)
            look.begin(with_snapshots=number == STEPS - 1)
            run(step, inputs, look)
    return {
        "warm_up": [dataclasses.astuple(each) for each in warm_up],
        "after_warm_up": dataclasses.asdict(_since(warm_up)),
        "over_steps": dataclasses.asdict(_since([each for points in look.steps for each in points.values()])),
        "points": [dataclasses.asdict(each) for each in over_steps(look.steps)],
        "snapshots": look.snapshots,
        "recordings": [*recordings(regions)],
        "device_used": allocator.used(),
        "counts": dict(regions.report.counts),
        "fallbacks": dict(regions.report.fallbacks),
        "environment": describe(device),
    }


def _warm_up(step: Step, inputs: Inputs, allocator: Allocator) -> Reading:
    step(inputs)
    return reading(allocator.read())


def _since(readings: Sequence[Reading]) -> Reading:
    """Return the last of some readings, with the peaks of all."""
    return dataclasses.replace(
        most(readings), reserved=readings[-1].reserved, allocated=readings[-1].allocated
    )


def run(step: Step, inputs: Inputs, look: Look) -> None:
    """Run a step as `Step` does, with a look before, between and behind its parts."""
    look.at(BEFORE, inputs)
    if step.optimizer is None:
        result = step.evaluate(inputs)
        look.at(FORWARD, inputs)
        del result  # until here, as it is there for its user
        return
    loss = step.forward(inputs)
    look.at(FORWARD, inputs)
    loss.backward()
    look.at(BACKWARD, inputs)
    step.update()
    look.at(OPTIMISER, inputs)


class Look:
    """Reads the allocator at points of steps, and in some steps takes a snapshot at each."""

    def __init__(self, allocator: Allocator, case: Case, step: Step, regions: Regions) -> None:
        self.steps: list[dict[str, Reading]] = []
        self.snapshots: dict[str, dict[str, Any]] = {}
        self._allocator, self._case, self._step, self._regions = allocator, case, step, regions
        self._with_snapshots = False

    def begin(self, *, with_snapshots: bool) -> None:
        """Begin a step."""
        self.steps.append({})
        self._with_snapshots = with_snapshots

    def at(self, point: str, inputs: Inputs) -> None:
        """Look at a point of the step."""
        self.steps[-1][point] = reading(self._allocator.read())
        if self._with_snapshots:
            owners = Owners({address: name for name, address in self._owned(inputs)})
            segments = self._allocator.snapshot()
            summary = dataclasses.asdict(summarize(segments, owners))
            self.snapshots[point] = {**summary, "segments": brief(segments, owners)}

    def _owned(self, inputs: Inputs) -> Iterator[tuple[str, int]]:
        """Yield owners and addresses of tensors; outputs, saved activations and workspaces have no owner."""
        module, optimizer = self._case.module, self._step.optimizer
        states = optimizer.state.values() if optimizer is not None else ()
        tensors = {
            "parameters": module.parameters(),
            "buffers": module.buffers(),
            "gradients": (each.grad for each in module.parameters() if each.grad is not None),
            "inputs": inputs.values(),
            "optimiser": (each for state in states for each in state.values() if torch.is_tensor(each)),
        }
        for name, each in tensors.items():
            yield from ((name, tensor.data_ptr()) for tensor in each)


def _recorded(regions: Regions) -> Iterator[tuple[Timed, Replay]]:
    """Yield each recording of each region."""
    for each in regions.all:
        if each.relocatable is not None:
            yield from ((each, replay) for replay in each.relocatable.replays)


def recordings(regions: Regions) -> Iterator[dict[str, Any]]:
    """Yield the memory of each recording."""
    for region, replay in _recorded(regions):
        assert region.relocatable is not None
        found = footprint_of(replay)
        yield {"kind": region.kind, **dataclasses.asdict(found)}


def main(arguments: list[str]) -> int:
    """Look at the workload of the first argument in the way of the second; the answer goes into the file of the third."""
    workload, way, answer_file = arguments

    def measured() -> dict[str, Any]:
        device = find_device("cuda")
        have_helper()
        return measure(workload, way, device, OfCuda(device))

    return write_answer(answer_file, measured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
