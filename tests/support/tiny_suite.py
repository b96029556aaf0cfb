"""A suite of tiny models that needs no library: `right`, `wrong` when it is compiled; any other cannot be built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.suites.cases import suite_case
from benchmarks.suites.structures import scalar_loss
from benchmarks.workloads import Mode, Workload

if TYPE_CHECKING:
    from benchmarks.workloads.case import Case, Inputs, Model

SOURCE = "tests.support.tiny_suite:build"


def tiny(model: str, mode: Mode = Mode.INFERENCE) -> Workload:
    return Workload(f"{model}-{mode}", mode, 2, SOURCE, model=model)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer that returns a structure. Matrix products alone: no C++ compiler takes its seconds for them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> dict[str, Any]:
        return {"first": self.linear(values), "second": (values @ values.t(), None)}


class WrongWhenCompiled(Layer):
    def forward(self, values: torch.Tensor) -> dict[str, Any]:
        output = super().forward(values)
        return {**output, "first": self.linear(output["first"])} if torch.compiler.is_compiling() else output


def build(device: torch.device, batch: int, model: str, mode: Mode) -> Case:
    dtype = torch.float32 if mode is Mode.TRAINING else torch.bfloat16
    module = {"right": Layer, "wrong": WrongWhenCompiled}[model]().to(device, dtype)

    def draw(generator: torch.Generator) -> Inputs:
        return {"values": torch.randn(batch, 8, device=device, dtype=dtype, generator=generator)}

    def call(compiled: Model, inputs: Inputs) -> Any:
        output = compiled(**inputs)
        return scalar_loss(output) if mode is Mode.TRAINING else output

    return suite_case(module, device, mode, draw, call, (model, 1e-3))
