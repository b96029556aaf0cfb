"""Workloads that need nothing but torch: the smallest one, where overhead is everything, and a small training."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Inputs, Model

_WIDTH = 64
_CLASSES = 10


class ThreeOps(torch.nn.Module):
    """Three pointwise operators, which Inductor makes one kernel of."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `sin(values) * 2 + 1`."""
        return torch.sin(values) * 2 + 1


def three_ops(device: torch.device, batch: int) -> Case:
    """Return `ThreeOps` on `batch` numbers."""

    def draw(generator: torch.Generator) -> Inputs:
        return {"values": torch.randn(batch, device=device, generator=generator)}

    return Case(ThreeOps(), draw, _call_with_values, precision=torch.float32)


def _call_with_values(model: Model, inputs: Inputs) -> torch.Tensor:
    return model(inputs["values"])


def mlp_training(device: torch.device, batch: int) -> Case:
    """Return a classifier of three linear layers."""

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "values": torch.randn(batch, _WIDTH, device=device, generator=generator),
            "labels": torch.randint(_CLASSES, (batch,), device=device, generator=generator),
        }

    return Case(
        _mlp().to(device),
        draw,
        _classification_loss,
        precision=torch.float32,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    )


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(_WIDTH, _WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(_WIDTH, _CLASSES),
    )


def _classification_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    return functional.cross_entropy(model(inputs["values"]), inputs["labels"])
