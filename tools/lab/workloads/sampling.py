"""The last layers of a language model with a sampler, whose temperature and penalty are CPU tensors that the user edits."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Inputs, Model, cpu_generator
from benchmarks.workloads.transformer import FeedForward

_WIDTH = 2_048
_VOCABULARY = 32_000
_LAYERS = 4


class Sampler(torch.nn.Module):
    """Logits of some more layers, sharpened by a temperature, with a penalty on what was said before.

    Both are plain attributes on the CPU: `sampler.temperature.fill_(0.7)` holds from the next call on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(FeedForward(_WIDTH) for _ in range(_LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(_WIDTH) for _ in range(_LAYERS + 1))
        self.output = torch.nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        # No parameters or buffers, which `Module.to` would move to the GPU.
        self.temperature = torch.ones((), device="cpu")
        self.penalty = torch.zeros((), device="cpu")

    def forward(self, hidden: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        """Return the probability of each token; `said` counts how often it was said."""
        for layer, norm in zip(self.layers, self.norms, strict=False):
            hidden = hidden + layer(norm(hidden))
        logits = self.output(self.norms[-1](hidden))
        return functional.softmax((logits - self.penalty * said) / self.temperature, dim=-1)


def sampler_inference(device: torch.device, batch: int) -> Case:
    """Return `Sampler` in bf16; temperature and penalty are edited in place before each call."""
    dtype = torch.bfloat16

    def draw(generator: torch.Generator) -> Inputs:
        on_cpu = cpu_generator(generator)
        said = torch.randint(3, (batch, _VOCABULARY), device=device, generator=generator)
        return {
            "hidden": torch.randn(batch, _WIDTH, device=device, dtype=dtype, generator=generator),
            "said": said.to(dtype),
            "temperature": 0.5 + torch.rand((), device="cpu", generator=on_cpu),
            "penalty": torch.rand((), device="cpu", generator=on_cpu),
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        model.temperature.copy_(inputs["temperature"])  # type: ignore[attr-defined]
        model.penalty.copy_(inputs["penalty"])  # type: ignore[attr-defined]
        return model(inputs["hidden"], inputs["said"])

    return Case(Sampler().eval().to(device, dtype), draw, call, precision=dtype)
