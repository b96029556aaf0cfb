"""ResNet-50 from torchvision, with random weights: speed does not depend on them, and nothing is downloaded."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Inputs, Model, require

_IMAGE = (3, 224, 224)
_CLASSES = 1000


def resnet50_inference(device: torch.device, batch: int) -> Case:
    """Return ResNet-50 in bf16, weights and images alike."""
    module = _resnet50().eval().to(device, torch.bfloat16)

    def draw(generator: torch.Generator) -> Inputs:
        return {"images": _images(device, batch, torch.bfloat16, generator)}

    return Case(module, draw, _logits, precision=torch.bfloat16)


def resnet50_training(device: torch.device, batch: int) -> Case:
    """Return ResNet-50 in float32 under bf16 autocast, trained by SGD with momentum."""

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "images": _images(device, batch, torch.float32, generator),
            "labels": torch.randint(_CLASSES, (batch,), device=device, generator=generator),
        }

    return Case(
        _resnet50().train().to(device),
        draw,
        _classification_loss,
        precision=torch.bfloat16,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        autocast=torch.bfloat16,
    )


def _resnet50() -> torch.nn.Module:
    return require("torchvision.models").resnet50(weights=None)


def _images(device: torch.device, batch: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch, *_IMAGE, device=device, dtype=dtype, generator=generator)


def _logits(model: Model, inputs: Inputs) -> torch.Tensor:
    return model(inputs["images"])


def _classification_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    return functional.cross_entropy(model(inputs["images"]), inputs["labels"])
