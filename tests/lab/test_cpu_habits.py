"""That the workloads about CPU tensors have the habits that they are there for, and mix devices only as PyTorch lets them.

They run on the meta device in place of a GPU, at their full size: no memory, no arithmetic, but the CPU stays the CPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.detection import Detector
from tools.lab.workloads import sampling
from tools.lab.workloads.diffusion import DiffusionSampler

pytestmark = pytest.mark.torch
GPU = torch.device("meta")

HABITS = {
    "dlrm-inference": ("index", 1),
    "xlnet-inference": ("_to_copy", 1),
    "xlnet-training": ("_to_copy", 1),
    "clip-inference": ("index", 1),
    "speech-transformer-inference": ("_to_copy", 5),
    "dalle-inference": ("_to_copy", 12),
    "t5-generation": ("_to_copy", 3 * 16),
    "sampler-inference": ("div", 1),
    "adam-step": ("mul", 24),
}
"""An operator to which CPU tensors are given beside GPU tensors or for the GPU, and how often in a step."""


class Devices(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators that run on the CPU, and those that take something from there to the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu: Counter[str] = Counter()
        self.from_cpu: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given, made = tensors((args, kwargs)), tensors(result)
        if any(tensor.device.type == "cpu" for tensor in made):
            self.on_cpu[name] += 1
        elif any(tensor.device.type == "cpu" for tensor in given):
            self.from_cpu[name] += 1
            allowed = name in ("_to_copy", "index") or all(
                tensor.dim() == 0 for tensor in given if tensor.device.type == "cpu"
            )
            assert allowed, f"{name} would refuse a CPU tensor beside a GPU's"
        return result


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run(name: str, devices: Devices) -> torch.Tensor:
    with GPU:  # as the child process builds them
        case = WORKLOADS[name].build(GPU)
    inputs = case.draw(torch.Generator())
    with torch.no_grad(), devices:
        return case.call(case.module, inputs)


@pytest.mark.parametrize("name", HABITS)
def test_a_step_works_on_the_cpu_and_gives_a_result_on_the_gpu(name: str) -> None:
    devices = Devices()
    assert run(name, devices).device.type == GPU.type
    operator, times = HABITS[name]
    assert devices.from_cpu[operator] == times, devices.from_cpu
    assert devices.on_cpu


def test_the_detector_makes_anchors_on_the_cpu_until_it_has_to_read_how_many_regions_there_are() -> None:
    devices = Devices()
    with pytest.raises(NotImplementedError, match="nonzero"):
        run("detection-inference", devices)
    assert devices.on_cpu["arange"] == 1
    assert devices.from_cpu == {"_to_copy": 1}


def test_the_cpu_computes_with_no_stack_of_what_comes_from_arange() -> None:
    """Inductor of torch 2.11 would put one on the GPU, and not what meets it."""
    traced = make_fx(lambda: Detector().anchors(16))()
    (stack,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)
    copies, after = {torch.ops.aten.view.default, torch.ops.aten.clone.default}, list(stack.users)
    for node in after:
        assert node.op == "output" or node.target in copies
        after += node.users


def test_the_diffusion_sampler_keeps_numpy_scalars() -> None:
    diffusion = DiffusionSampler()
    assert isinstance(diffusion.denoiser.gain, np.float64)
    assert isinstance(diffusion.schedule[0], np.float64)


def test_what_is_edited_on_the_cpu_is_seen_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_WIDTH", 64)  # it computes, unlike all else here
    monkeypatch.setattr(sampling, "_VOCABULARY", 512)
    case = WORKLOADS["sampler-inference"].build(torch.device("cpu"))
    inputs = case.draw(torch.Generator().manual_seed(1))
    with torch.no_grad():
        warm = case.call(case.module, {**inputs, "temperature": torch.tensor(4.0)})
        cold = case.call(case.module, {**inputs, "temperature": torch.tensor(0.5)})
    assert cold.amax() > warm.amax()


def test_cpu_inputs_follow_the_generator() -> None:
    case = WORKLOADS["speech-transformer-inference"].build(GPU)
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first, second = case.draw(one)["frame_counts"], case.draw(one)["frame_counts"]
    assert first.device.type == "cpu"
    assert not torch.equal(first, second)
    assert torch.equal(first, case.draw(other)["frame_counts"])
