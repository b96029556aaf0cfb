"""A sampler of the diffusion kind (Song et al., 2021), whose schedule and scale are NumPy's scalars, as much research code has them."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.workloads.case import Case, Inputs, Model, require
from benchmarks.workloads.transformer import FeedForward

_WIDTH = 1_024
_LAYERS = 6
_STEPS = 10


class Denoiser(torch.nn.Module):
    """One step towards less noise. `gain` is NumPy's from the start, the parts of signal are so in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1 / require("numpy").sqrt(_LAYERS)
        self.layers = torch.nn.ModuleList(FeedForward(_WIDTH) for _ in range(_LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(_WIDTH) for _ in range(_LAYERS))

    def forward(self, noisy: torch.Tensor, signal: Any, next_signal: Any) -> torch.Tensor:
        """Return what is less noisy: of which `next_signal` is the part of the signal, and not `signal`."""
        values = noisy
        for layer, norm in zip(self.layers, self.norms, strict=True):
            values = values + layer(norm(values)) * self.gain
        noise = values
        clean = (noisy - noise * (1 - signal) ** 0.5) / signal**0.5
        return clean * next_signal**0.5 + noise * (1 - next_signal) ** 0.5


class DiffusionSampler(torch.nn.Module):
    """All steps from noise to a sample; the loop is ordinary code, and each step of it a call of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = require("numpy").linspace(0.1, 0.9, _STEPS + 1)
        self.denoiser = Denoiser()

    # Dynamo would unroll the loop, and make one graph of all steps. Not recursive: the modules that are
    # called are compiled all the same.
    @torch.compiler.disable(recursive=False)
    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Return samples."""
        values = noise
        for index in range(_STEPS):
            values = self.denoiser(values, self.schedule[index], self.schedule[index + 1])
        return values


def diffusion_inference(device: torch.device, batch: int) -> Case:
    """Return `DiffusionSampler` in float32."""

    def draw(generator: torch.Generator) -> Inputs:
        return {"noise": torch.randn(batch, _WIDTH, device=device, generator=generator)}

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(inputs["noise"])

    return Case(DiffusionSampler().eval().to(device), draw, call, precision=torch.float32)
