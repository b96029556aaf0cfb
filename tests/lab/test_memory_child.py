"""Steps that are looked at, on the CPU, beside an allocator that is none: what CUDA's says is for a GPU to tell."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.region_child import Regions, Timed
from benchmarks.step import Step
from benchmarks.variants import Compile
from benchmarks.workloads import WORKLOADS
from pygraphd.client.analysis.graph_facts import GraphFacts
from tests.support.allocator_stats import stats
from tools.lab.memory import render
from tools.lab.memory_child import STEPS, WARM_UP, Look, measure, recordings, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pygraphd.client.replay.replay import Replay
    from tests.support.recorder import Recorder

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
MB = 1 << 20


class Counting:
    """An allocator whose every reading is told from others; its blocks are those of some tensors, and one more."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.readings = 0
        self._blocks = [(each.data_ptr(), each.nbytes) for each in tensors]

    def read(self) -> Mapping[str, int]:
        self.readings += 1
        return stats(self.readings, self.readings, 1000 - self.readings, 1000 - self.readings)

    def snapshot(self) -> list[dict[str, Any]]:
        blocks = [
            {"address": address, "size": size, "state": "active_allocated"}
            for address, size in [*self._blocks, (0, MB)]
        ]
        total = sum(block["size"] for block in blocks)
        segment = {"address": 0, "total_size": total, "segment_type": "large", "segment_pool_id": (0, 0)}
        return [{**segment, "blocks": blocks}]

    def used(self) -> int:
        return 5 * MB


@pytest.mark.parametrize(
    ("workload", "points"),
    [
        ("mlp-training", ["before forward", "after forward", "after backward", "after the optimiser"]),
        ("three-ops", ["before forward", "after forward"]),
    ],
)
def test_steps_are_looked_at_before_between_and_behind_their_parts(workload: str, points: list[str]) -> None:
    counting = Counting()

    found = measure(workload, "kernels", CPU, counting)

    assert counting.readings == WARM_UP + STEPS * len(points)
    assert [each["name"] for each in found["points"]] == points
    assert list(found["snapshots"]) == points
    assert found["after_warm_up"]["reserved"] == len(found["warm_up"]) == WARM_UP
    assert found["after_warm_up"]["most_reserved"] == 999
    assert found["over_steps"]["most_allocated"] == 999 - WARM_UP
    assert found["points"][-1]["most"]["reserved"] == counting.readings
    assert json.loads(json.dumps(found))["device_used"] == 5 * MB
    assert render([{"way": "kernels", **found}]).startswith("MB")


class Watching(Counting):
    """Notes at each reading how many parameters have gradients, and whether they have moved."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []
        self._module, self._before = module, [each.detach().clone() for each in module.parameters()]

    def read(self) -> Mapping[str, int]:
        found = list(self._module.parameters())
        moved = not all(map(torch.equal, found, self._before))
        self.seen.append((sum(each.grad is not None for each in found), moved))
        return super().read()


def test_looks_are_where_their_names_say() -> None:
    case = WORKLOADS["mlp-training"].build(CPU)
    watching, step = Watching(case.module), Step(case, CPU, Compile.EAGER)
    look = Look(watching, case, step, Regions("kernels"))
    count = len([*case.module.parameters()])

    look.begin(with_snapshots=False)
    run(step, case.draw(torch.Generator().manual_seed(0)), look)

    assert dict(zip(look.steps[0], watching.seen, strict=True)) == {
        "before forward": (0, False),
        "after forward": (0, False),
        "after backward": (count, False),
        "after the optimiser": (0, True),
    }
    assert not look.snapshots


def test_what_was_installed_is_taken_out_again() -> None:
    from torch._inductor import compile_fx

    before = compile_fx.cudagraphify
    undo = Regions("kernels").install()
    assert compile_fx.cudagraphify is not before

    undo()
    measure("three-ops", "kernels", CPU, Counting())

    assert compile_fx.cudagraphify is before


def test_tensors_are_told_by_what_they_are_for(recorder: Recorder) -> None:
    """Of a training with momentum, beside a recording that copies an input."""
    module = torch.nn.BatchNorm1d(700)
    case = dataclasses.replace(
        WORKLOADS["mlp-training"].build(CPU),
        module=module,
        optimizer=lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9),
    )
    step = Step(case, CPU, Compile.EAGER)
    inputs = {"values": torch.randn(3, 700)}
    module(inputs["values"]).sum().backward()
    assert step.optimizer is not None
    step.optimizer.step()
    regions, replay = recorded(recorder)
    momentum = [state["momentum_buffer"] for state in step.optimizer.state.values()]
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    running = [module.running_mean, module.running_var]
    counting = Counting([*module.parameters(), *running, *gradients, *inputs.values(), *momentum])
    look = Look(counting, case, step, regions)

    look.begin(with_snapshots=True)
    look.at("now", inputs)

    assert look.snapshots["now"]["by_owner"] == {
        "others": MB,
        "inputs": 8400,
        "parameters": 5600,
        "gradients": 5600,
        "optimiser": 5600,
        "buffers": 5600,
    }
    ((found),) = recordings(regions)
    assert found["kind"] == "forward"
    replay.close()


def recorded(recorder: Recorder) -> tuple[Regions, Replay]:
    """Return a region that has a recording, and that one."""
    given, out = torch.randn(50), recorder.arena.allocate(50)
    recorder.graph.scale(given, out, 2.0)
    replay = recorder.built([given], [out]).replay
    relocatable: Any = SimpleNamespace(replays=(replay,), facts=GraphFacts())
    regions = Regions("graph")
    regions.all.append(Timed(replay.serve, "forward", relocatable))
    return regions, replay
