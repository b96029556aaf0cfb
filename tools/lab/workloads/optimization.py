"""A step of Adam (Kingma and Ba, 2015) as a graph of its own, whose counters are on the CPU as `torch.optim` keeps them."""

from __future__ import annotations

import torch

from benchmarks.workloads.case import Case, Inputs, Model

_WIDTH = 768
_BLOCKS = 6
_RATE = 1e-3
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class Adam(torch.nn.Module):
    """Weights of the size of a transformer's linear layers, and what Adam keeps of each: two moments and a counter.

    All are buffers, so that what a step makes of them is compared. The counters are CPU tensors, one for each weight, as
    those of `torch.optim.Adam` with `capturable=False`.
    """

    def __init__(self) -> None:
        super().__init__()
        shapes = [(4 * _WIDTH, _WIDTH), (4 * _WIDTH,), (_WIDTH, 4 * _WIDTH), (_WIDTH,)] * _BLOCKS
        self.shapes = shapes
        for index, shape in enumerate(shapes):
            self.register_buffer(f"weight{index}", torch.randn(shape) / 50)
            self.register_buffer(f"mean{index}", torch.zeros(shape))
            self.register_buffer(f"square{index}", torch.zeros(shape))
            self.register_buffer(f"step{index}", torch.zeros((), device="cpu"))

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        """Update everything; return the mean square of each weight, to be logged."""
        for index, gradient in enumerate(gradients):
            self._update(index, gradient)
        weights = [getattr(self, f"weight{index}") for index in range(len(gradients))]
        return torch.stack([weight.square().mean() for weight in weights])

    def _update(self, index: int, gradient: torch.Tensor) -> None:
        mean, square = getattr(self, f"mean{index}"), getattr(self, f"square{index}")
        step = getattr(self, f"step{index}")
        step += 1
        mean.lerp_(gradient, 1 - _BETAS[0])
        square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        rate = _RATE / (1 - _BETAS[0] ** step)
        spread = square.sqrt() / (1 - _BETAS[1] ** step).sqrt() + _EPSILON
        getattr(self, f"weight{index}").sub_(mean / spread * rate)


def adam_step(device: torch.device, batch: int) -> Case:
    """Return `Adam` with random gradients; there is no item in it, so the batch is one."""
    with device:  # made there, and not moved there, which would move the counters, too
        module = Adam()

    def draw(generator: torch.Generator) -> Inputs:
        return {
            f"gradient{index}": torch.randn(shape, device=device, generator=generator)
            for index, shape in enumerate(module.shapes)
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(*inputs.values())

    return Case(module, draw, call, precision=torch.float32)
