"""TIMM's models of the dashboard, by their names: random weights, nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.suites.cases import suite_case
from benchmarks.suites.structures import scalar_loss
from benchmarks.suites.tables import TIMM_TOLERANCES
from benchmarks.workloads import Mode
from benchmarks.workloads.case import require

if TYPE_CHECKING:
    from benchmarks.workloads.case import Case, Inputs, Model


def build(device: torch.device, batch: int, model: str, mode: Mode) -> Case:
    """Return a model by its name; raises BenchmarkError if timm is missing, and RuntimeError if it has no such model."""
    timm = require("timm")
    module = timm.create_model(model, pretrained=False, in_chans=3, drop_rate=0.0)
    training = mode is Mode.TRAINING
    # Some models are tested on larger images than they are trained on.
    size = require("timm.data").resolve_data_config({}, model=module, use_test_size=not training)[
        "input_size"
    ]
    dtype = torch.float32 if training else torch.bfloat16

    def draw(generator: torch.Generator) -> Inputs:
        return {"images": torch.randn(batch, *size, device=device, dtype=dtype, generator=generator)}

    def call(compiled: Model, inputs: Inputs) -> Any:
        output = compiled(inputs["images"])
        return scalar_loss(output) if training else output

    tolerance = TIMM_TOLERANCES.get(model, 1e-2) if training else 1e-3
    return suite_case(module.to(device, dtype), device, mode, draw, call, (model, tolerance))
