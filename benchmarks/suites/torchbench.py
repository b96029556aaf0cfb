"""TorchBench's models from a checkout that the user has: random weights, nothing is downloaded.

Inputs are a model's own example: its floating numbers are drawn anew near it in each step, other numbers are copied.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.suites.cases import suite_case
from benchmarks.suites.catalogue import FOLDER_VARIABLE
from benchmarks.suites.structures import redrawn, scalar_loss, tensors_of, with_tensors
from benchmarks.suites.tables import (
    TORCHBENCH_AMP,
    TORCHBENCH_FP16,
    TORCHBENCH_HIGH_TOLERANCE,
    TORCHBENCH_OWN_BATCH,
)
from benchmarks.workloads import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.workloads.case import Case, Inputs, Model


def build(device: torch.device, batch: int, model: str, mode: Mode) -> Case:
    """Return a model by its folder's name; raises BenchmarkError if no checkout is named, and whatever the model raises."""
    training, autocast = mode is Mode.TRAINING, model in TORCHBENCH_AMP
    module, example = _load(device, None if model in TORCHBENCH_OWN_BATCH else batch or None, model, mode)
    if not training and not autocast:
        dtype = torch.float16 if model in TORCHBENCH_FP16 else torch.bfloat16
        module = module.to(dtype)
        example = with_tensors(example, lambda _, each: each.to(dtype) if each.is_floating_point() else each)
    examples = dict(tensors_of(example))

    def draw(generator: torch.Generator) -> Inputs:
        return {name: redrawn(each, generator) for name, each in examples.items()}

    def call(compiled: Model, inputs: Inputs) -> Any:
        arguments = with_tensors(example, lambda name, _: inputs[name])
        output = compiled(**arguments) if isinstance(arguments, dict) else compiled(*arguments)
        return scalar_loss(output) if training else output

    tolerance = 1e-3 if training or autocast else 1e-4
    accuracy = (model, 1e-2 if model in TORCHBENCH_HIGH_TOLERANCE else tolerance)
    return suite_case(module, device, mode, draw, call, accuracy, autocast=autocast)


def _load(device: torch.device, batch: int | None, model: str, mode: Mode) -> tuple[torch.nn.Module, Any]:
    """Return a model of the checkout and its example of inputs."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise BenchmarkError(f"name a checkout of TorchBench in {FOLDER_VARIABLE}, or with --torchbench DIR")
    os.chdir(folder)  # some models read files of theirs by names relative to it
    sys.path.append(folder)
    if model.startswith("basic_gnn_"):
        # It makes models scriptable by a module that newer releases of the library do without.
        scriptable = types.ModuleType("torch_geometric.compile")
        vars(scriptable)["to_jittable"] = lambda module: module
        sys.modules.setdefault(scriptable.__name__, scriptable)
    made = importlib.import_module(f"torchbenchmark.models.{model}").Model
    # TorchBench's own loader, which is not used here, sets the name.
    if not hasattr(made, "name"):
        made.name = model
    # Models place what they make themselves, and make some of it on the CPU.
    with torch.device("cpu"), random_weights():
        built = made(
            test="train" if mode is Mode.TRAINING else "eval",
            device=device.type,
            batch_size=batch,
            extra_args=[],
        )
        module, example = built.get_module()
    if model == "yolov3":  # its own example is of another kind than its module takes
        example = (torch.rand(built.batch_size, 3, 384, 512, device=device),)
    return module, example


class _NoWeights(dict[str, Any]):
    """Stands for trained weights that are not there; loading it leaves a module's random ones."""


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """Have torch.hub and torchvision give no trained weights, and modules keep their random ones, until the block ends."""
    load = torch.nn.Module.load_state_dict

    def loaded(module: torch.nn.Module, weights: Any, *arguments: Any, **options: Any) -> Any:
        return None if isinstance(weights, _NoWeights) else load(module, weights, *arguments, **options)

    places = [(torch.hub, "load_state_dict_from_url", _nothing), (torch.nn.Module, "load_state_dict", loaded)]
    with contextlib.suppress(ImportError):
        models = importlib.import_module("torchvision.models")
        places.append((models.WeightsEnum, "get_state_dict", _nothing))
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in places:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def _nothing(*_arguments: Any, **_options: Any) -> _NoWeights:
    return _NoWeights()
