"""The child process of `addresses`: steps of one workload whose addresses stay or alternate, with regions run in one way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.child import describe, write_answer
from benchmarks.region_child import prepare
from benchmarks.region_table import REDUCE_OVERHEAD
from tools.lab.addresses import Addresses, figures

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions
    from benchmarks.region_child import Runnable, Timed


class Total:
    """The host's time in the calls of all regions, in us."""

    def __init__(self) -> None:
        self.us = 0.0

    def around(self, region: Timed) -> Runnable:
        """Return a region's call that adds to the total."""

        def call(inputs: list[Any]) -> Any:
            # Nothing is synchronised here: the host's part of a call ends when it returns, while the GPU may
            # still be at work.
            began = time.perf_counter_ns()
            result = region.run(inputs)
            self.us += (time.perf_counter_ns() - began) / 1e3
            return result

        return call


def measure(workload: str, way: str, conditions: Conditions) -> dict[str, Any]:
    """Time steps whose addresses stay, and steps whose addresses alternate."""
    program = prepare(workload, way, conditions)
    total = Total()
    program.regions.time_calls(total.around)
    batches = [program.draw() for _ in range(4)]
    windows = Addresses(program.step, batches, conditions, lambda: total.us)
    # PyTorch refuses two forwards in flight: the first's outputs would be overwritten.
    ways = windows.ways(training=program.case.optimizer is not None, may_overlap=way != REDUCE_OVERHEAD)
    return {**figures(windows.rounds(ways)), "environment": describe(program.device)}


def main(arguments: list[str], conditions: Conditions) -> int:
    """Measure the workload of the first argument in the way of the second, and write the answer to the file of the third."""
    workload, way, answer_file = arguments
    return write_answer(answer_file, lambda: measure(workload, way, conditions))
