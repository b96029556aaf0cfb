"""Comparison with eager by the rules of PyTorch's dashboard: one evaluation each from the same weights, inputs and random state.

A tensor passes if it is close to eager's by the tolerance, or if its distance from float64 is at most a multiple of eager's. A model
whose results in eager mode depend on the random state is not compared, as compiled code draws other numbers.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.correctness import Verdict
from benchmarks.step import Step
from benchmarks.suites.structures import tensors_of
from benchmarks.variants import Compile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.workloads.case import Case, Inputs

_SEEDS = (0, 1)
_HALF = (torch.float16, torch.bfloat16)
_SMALL, _TINY, _FEW = 1000, 500, 10
_HIGH_TOLERANCE = 2e-2
_SIMILAR = 0.99
_ONLY_LOSS = "QuestionAnsweringModelOutput"
"""Of this type the dashboard compares the loss alone."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The rule for one model: its tolerance, and whether small tensors may be off by more."""

    tolerance: float
    lenient: bool = False
    cosine: bool = False

    def check(self, case: Case, step: Step, device: torch.device, draw: Callable[[], Inputs]) -> Verdict:
        """Compare `step`, which runs `case`, with eager. What cannot be compared, for lack of memory for one, is no error."""
        inputs = draw()
        # Kept before the first evaluation, which may change buffers.
        weights = {name: tensor.clone() for name, tensor in case.module.state_dict().items()}
        actual = _results(step, case, inputs, weights)
        try:
            eager_case = dataclasses.replace(case, module=copy.deepcopy(case.module))
            eager_step = Step(eager_case, device, Compile.EAGER)
            eager, other = (_results(eager_step, eager_case, inputs, weights, seed) for seed in _SEEDS)
        except Exception as error:  # noqa: BLE001 - the model has been timed
            return Verdict(None, f"not compared: {type(error).__name__}: {error}"[:200])
        if Accuracy(self.tolerance).find_difference(other, eager, None):
            return Verdict(None, "not compared: eager's results depend on the random state")
        exact = _exact(eager_case, device, inputs, weights)
        # Without float64 the dashboard asks for a similar direction only.
        rule = self if exact else dataclasses.replace(self, cosine=True)
        wrong = rule.find_difference(actual, eager, exact)
        note = "" if exact else "compared without float64"
        return Verdict(wrong is None, "; ".join(filter(None, (wrong, note))))

    def find_difference(self, actual: Tensors, eager: Tensors, exact: Tensors | None) -> str | None:
        """Return the first tensor of `actual` that fails; None if all pass."""
        if actual.keys() != eager.keys():
            return f"results of other names than eager's: {sorted(actual.keys() ^ eager.keys())[:3]}"
        for name, tensor in eager.items():
            if wrong := self._difference(actual[name], tensor, exact and exact.get(name)):
                return f"{name} {wrong}"
        return None

    def _difference(
        self, actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None
    ) -> str | None:
        if (actual.shape, actual.dtype) != (eager.shape, eager.dtype):
            return f"is {actual.dtype} {list(actual.shape)}, {eager.dtype} {list(eager.shape)} in eager mode"
        if not eager.is_floating_point():
            return None if torch.equal(actual, eager) else "differs"
        if torch.allclose(actual, eager, atol=self.tolerance, rtol=self.tolerance, equal_nan=True):
            return None
        if self.cosine:
            similar = _cosine(actual, eager)
            return None if similar >= _SIMILAR else f"has a cosine similarity of {similar:.3f}"
        if exact is None or exact.shape != eager.shape:
            largest = float((actual.double() - eager.double()).abs().max())
            return f"is off by up to {largest:.3g}, {self.tolerance:g} allowed"
        error, own = _rmse(actual, exact), _rmse(eager, exact)
        allowed = self._multiplier(eager) * own + self.tolerance / 10
        return None if error <= allowed else f"is off by {error:.3g}, {allowed:.3g} allowed"

    def _multiplier(self, eager: torch.Tensor) -> float:
        if self.lenient and eager.numel() <= _TINY:
            return 10.0 if eager.numel() <= _FEW else 8.0
        pointwise = eager.ndim == 4 and eager.shape[-1] == eager.shape[-2] == 1
        # In small tensors and convolutions of 1 x 1 noise weighs more, as the dashboard has seen.
        loose = eager.numel() < _SMALL or pointwise or self.tolerance >= _HIGH_TOLERANCE
        # Half precision, too: there the dashboard had false alarms with 2.
        return 3.0 if loose or eager.dtype in _HALF else 2.0


def _results(step: Step, case: Case, inputs: Inputs, weights: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Return copies of output, gradients and buffers of one evaluation from these weights."""
    module = case.module
    module.load_state_dict(weights, strict=False)
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    # Copies: a model that writes to its inputs must not change those of the next evaluation.
    output = step.evaluate({name: tensor.detach().clone() for name, tensor in inputs.items()})
    if type(output).__name__ == _ONLY_LOSS:
        output = output.loss
    found = {f"output {name}".rstrip(): tensor for name, tensor in tensors_of(output)}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    copies = {name: tensor.detach().clone() for name, tensor in found.items()}
    module.zero_grad(set_to_none=True)
    return copies


def _exact(case: Case, device: torch.device, inputs: Inputs, weights: Mapping[str, Any]) -> Tensors | None:
    """Return eager's results in float64; None if the model does not run in it, or the memory does not suffice. Ends `case`."""
    try:
        exact = dataclasses.replace(case, module=case.module.double(), autocast=None)
        wide = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        return _results(Step(exact, device, Compile.EAGER), exact, wide, weights)
    except Exception:  # noqa: BLE001 - the dashboard does without, too
        return None


def _rmse(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).square().mean().sqrt())


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    flat = (each.flatten().double() for each in (one, other))
    return float(torch.nn.functional.cosine_similarity(*flat, dim=0, eps=1e-6))
