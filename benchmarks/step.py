"""One step of a workload as a user would write it, compiled or not. Knows nothing of timing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.errors import BenchmarkError
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

    def __call__(self, inputs: Inputs) -> Any:
        """Run one step; returns the output or the loss."""
        result = self.evaluate(inputs)
        self.update()
        return result

    def update(self) -> None:
        """Run the optimiser, if there is one, and drop the gradients."""
        if self.optimizer:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, inputs: Inputs) -> Any:
        """Run all of a step but its update: in training the gradients are left on the parameters."""
        if self.optimizer is None:
            with torch.no_grad():
                return self.forward(inputs)
        loss = self.forward(inputs)
        loss.backward()
        return loss

    def forward(self, inputs: Inputs) -> Any:
        """Run the model: its output, or the loss to call `backward` of."""
        # Around the forward alone, as PyTorch advises: a backward runs in the types that its forward had.
        with self._autocast():
            return self._case.call(self._model, inputs)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._case.autocast is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[object] = torch.autocast(
            self._device.type, dtype=self._case.autocast
        )
        return context


# PyTorch asks for some calls on a side stream before a capture. Libraries initialise themselves in them,
# which may allocate memory, and would fail in the capture.
_WARM_UP = 3


class RecordedStep(Step):
    """Inference recorded by hand in one CUDA graph at the first step, and replayed with inputs copied into the recorded ones.

    Raises BenchmarkError for a case that is trained, or on a device that is no GPU.
    """

    def __init__(self, case: Case, device: torch.device, compile_as: Compile) -> None:
        if case.optimizer or device.type != "cuda":
            raise BenchmarkError("only inference on a GPU is recorded by hand in one CUDA graph")
        super().__init__(case, device, compile_as)
        self._recorded: tuple[torch.cuda.CUDAGraph, Inputs, Any] | None = None

    def evaluate(self, inputs: Inputs) -> Any:
        """Run all of a step; the output is overwritten by the next one."""
        if self._recorded is None:
            # The graph needs inputs of its own, as the caller's may go.
            self._recorded = self._record({name: tensor.clone() for name, tensor in inputs.items()})
        graph, recorded, output = self._recorded
        for name, tensor in inputs.items():
            # A graph reads the addresses that it was recorded with.
            recorded[name].copy_(tensor)
        graph.replay()
        return output

    def _record(self, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Inputs, Any]:
        side = torch.cuda.Stream()
        # The inputs are still being written on the current stream.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                super().evaluate(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = super().evaluate(inputs)
        return graph, inputs, output


def step_of(case: Case, device: torch.device, compile_as: Compile) -> Step:
    """Return the step of a case, compiled as asked for."""
    kind = RecordedStep if compile_as is Compile.CUDA_GRAPH else Step
    return kind(case, device, compile_as)


def _compiled(module: torch.nn.Module, compile_as: Compile) -> Model:
    model: Model = module
    if compile_as is not Compile.EAGER:
        model = torch.compile(module, mode=str(compile_as.mode))
    return model
