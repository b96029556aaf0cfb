"""One step of a workload as a user would write it, compiled or not. Knows nothing of timing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from benchmarks.variants import Compile

if TYPE_CHECKING:
    from benchmarks.workloads.case import Case, Inputs, Model


class Step:
    """Inference: a forward pass without gradients. Training: forward, loss, backward, optimiser, gradients dropped."""

    def __init__(self, case: Case, device: torch.device, compile_as: Compile) -> None:
        self._case = case
        self._device = device
        self._model = _compiled(case.module, compile_as)
        self.optimizer = case.optimizer(case.module.parameters()) if case.optimizer else None

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Run one step; returns the output or the loss."""
        result = self.evaluate(inputs)
        self.update()
        return result

    def update(self) -> None:
        """Run the optimiser, if there is one, and drop the gradients."""
        if self.optimizer:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, inputs: Inputs) -> torch.Tensor:
        """Run all of a step but its update: in training the gradients are left on the parameters."""
        if self.optimizer is None:
            with torch.no_grad():
                return self.forward(inputs)
        loss = self.forward(inputs)
        loss.backward()
        return loss

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Run the model: its output, or the loss to call `backward` of."""
        with self._autocast():
            return self._case.call(self._model, inputs)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._case.autocast is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[object] = torch.autocast(
            self._device.type, dtype=self._case.autocast
        )
        return context


def _compiled(module: torch.nn.Module, compile_as: Compile) -> Model:
    model: Model = module
    if compile_as is not Compile.EAGER:
        model = torch.compile(module, mode=str(compile_as))
    return model
