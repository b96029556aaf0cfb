"""Workloads with one property each: many inputs, many nodes, large inputs that move, heavy and small graphs in one program."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Inputs, Model

_WIDTH = 64


def _call_with_values(model: Model, inputs: Inputs) -> torch.Tensor:
    return model(inputs["values"])


class Wide(torch.nn.Module):
    """Many small linear layers with a scale in the end: the graph has two inputs a layer, the scale and the values."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))
        self.scale = torch.nn.Parameter(torch.ones(_WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values * self.scale


def wide_inference(device: torch.device, batch: int) -> Case:
    """Return `Wide` with 200 inputs."""

    def draw(generator: torch.Generator) -> Inputs:
        return {"values": torch.randn(batch, _WIDTH, device=device, generator=generator)}

    # A weight and a bias of each layer, the scale and the values are 200.
    return Case(Wide(99).to(device), draw, _call_with_values, precision=torch.float32)


class Deep(torch.nn.Module):
    """Layers that are a product of matrices and a kernel of Inductor's each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.products = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(layers))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for product, norm in zip(self.products, self.norms, strict=True):
            values = functional.gelu(norm(product(values)))
        return values


def deep_inference(device: torch.device, batch: int) -> Case:
    """Return `Deep` with 250 layers: a graph of 500 nodes."""
    width = 256

    def draw(generator: torch.Generator) -> Inputs:
        return {"values": torch.randn(batch, width, device=device, generator=generator, dtype=torch.bfloat16)}

    module = Deep(width, layers=250).to(device, torch.bfloat16)
    return Case(module, draw, _call_with_values, precision=torch.bfloat16)


def autoencoder_inference(device: torch.device, batch: int) -> Case:
    """Return an autoencoder of the length of a small recording's spectrum, whose input is far larger than its weights."""
    features, code = 197_951, 128

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "values": torch.randn(batch, features, device=device, generator=generator, dtype=torch.bfloat16)
        }

    module = torch.nn.Sequential(
        torch.nn.Linear(features, code), torch.nn.ReLU(), torch.nn.Linear(code, features)
    )
    return Case(module.to(device, torch.bfloat16), draw, _call_with_values, precision=torch.bfloat16)


class Heavy(torch.nn.Module):
    """Two large linear layers on an input that is large, too: copying it to a fixed place costs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rows and columns of the output."""
        return self.layers(values)[:_WIDTH, :_WIDTH]


class Small(torch.nn.Module):
    """Three small linear layers, in a class of its own: Dynamo does not compile torch's by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(_WIDTH, _WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(_WIDTH, _WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(_WIDTH, _WIDTH),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        return self.layers(values)


class Mixed(torch.nn.Module):
    """A heavy graph and many small ones in a program that is not compiled itself: each part is a graph of its own."""

    def __init__(self, width: int, small: int, *, heavy_first: bool) -> None:
        super().__init__()
        self.heavy = Heavy(width)
        self.small = torch.nn.ModuleList(Small() for _ in range(small))
        self.heavy_first = heavy_first

    # Not recursive: this frame alone is left out, and each module that it calls is compiled by itself.
    @torch.compiler.disable(recursive=False)
    def forward(self, large: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return what the last part makes of what the parts before it have made."""
        if self.heavy_first:
            values = values + self.heavy(large)
        for part in self.small:
            values = part(values)
        return values if self.heavy_first else values + self.heavy(large)


def heavy_then_small(device: torch.device, batch: int) -> Case:
    """Return `Mixed` in which the GPU is busy when the small graphs are called."""
    return _mixed(device, batch, heavy_first=True)


def small_then_heavy(device: torch.device, batch: int) -> Case:
    """Return `Mixed` in which the GPU waits for the host to call the small graphs."""
    return _mixed(device, batch, heavy_first=False)


def _mixed(device: torch.device, batch: int, *, heavy_first: bool) -> Case:
    width, dtype = 8192, torch.bfloat16

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "large": torch.randn(batch, width, device=device, generator=generator, dtype=dtype),
            "values": torch.randn(_WIDTH, _WIDTH, device=device, generator=generator, dtype=dtype),
        }

    module = Mixed(width, small=24, heavy_first=heavy_first).to(device, dtype)
    return Case(module, draw, lambda model, inputs: model(inputs["large"], inputs["values"]), precision=dtype)
