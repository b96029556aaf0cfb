"""Comparison of a compiled step with uncompiled eager, from the same weights, inputs and random state.

A deterministic step is held against float64: it may be wrong by a small multiple of what eager in the same precision is
wrong by, and a floor. A stochastic one (dropout) draws other random numbers than eager does, so there averages over
some seeds are compared: they may differ from eager's about as much as eager's under other seeds differ among themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from benchmarks.step import Step
from benchmarks.variants import Compile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.workloads.case import Case, Inputs

_DRAWS = 2
_STOCHASTIC_DRAWS = 8
_MULTIPLE = 3.0
"""How many times eager's own error is allowed: rounding differs wherever kernels are fused or split."""
FLOORS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-9}
"""Error allowed beside that, relative to the root mean square of the norms of the tensors of a kind."""
_EAGER_AVERAGES = 4
_RATIO = (0.85, 1.3)
"""Gradients' distance to eager's, over that of eager's among each other. 0.7: no dropout. 2.1: one mask for all draws."""
_LOSS_DEVIATIONS = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the step was right; None: it could not be compared. The note says where not, or how it was compared."""

    correct: bool | None
    note: str = ""


Results = dict[str, dict[str, torch.Tensor]]
"""Kind (output, gradients, buffers) -> name -> tensor."""


class Subject:
    """A step with its module, evaluated without updating the weights."""

    def __init__(self, case: Case, device: torch.device, step: Step | None = None) -> None:
        self.case = case
        self._step = step or Step(case, device, Compile.EAGER)

    def results(self, inputs: Inputs, seed: int) -> Results:
        """Return copies of everything that one evaluation gives or changes; gradients are dropped afterwards."""
        torch.manual_seed(seed)
        # Copied at once: with PyTorch's CUDA graphs the next evaluation writes over this output.
        output = self._step.evaluate(inputs).detach().clone()
        module = self.case.module
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        buffers = {
            name: buffer.clone() for name, buffer in module.named_buffers() if buffer.is_floating_point()
        }
        # Else the next evaluation would add to these.
        module.zero_grad(set_to_none=True)
        return {"output": {"": output}, "gradient": gradients, "buffer": buffers}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over the weights and buffers of another module."""
        self.case.module.load_state_dict(weights)


def check(case: Case, step: Step, device: torch.device, draw: Callable[[], Inputs]) -> Verdict:
    """Compare `step`, which runs `case`, with eager copies of the case."""
    subject = Subject(case, device, step)
    compare = _check_stochastic if case.stochastic else _check_exact
    return compare(subject, device, draw)


def _check_exact(subject: Subject, device: torch.device, draw: Callable[[], Inputs]) -> Verdict:
    eager = Subject(_copy(subject.case), device)
    exact = Subject(_in_float64(_copy(subject.case)), device)
    for seed in range(_DRAWS):
        inputs = draw()
        # Anew for each draw, since an evaluation changes buffers, as those of a batch norm.
        weights = _weights(subject.case.module)
        eager.load(weights)
        exact.load(weights)
        wrong = find_difference(
            subject.results(inputs, seed),
            eager.results(inputs, seed),
            exact.results(_inputs_in_float64(inputs), seed),
            FLOORS[subject.case.precision],
        )
        if wrong:
            return Verdict(False, wrong)
    return Verdict(True)


def find_difference(actual: Results, eager: Results, exact: Results, floor: float) -> str | None:
    """Return the first error of `actual`, judged by the distance of `eager` from `exact`; None if there is none."""
    for kind, tensors in exact.items():
        if tensors.keys() != actual[kind].keys():
            return f"{kind}s of other names than eager's: {sorted(tensors.keys() ^ actual[kind].keys())[:3]}"
        # Of all tensors of a kind: a share of one that is nearly zero would allow for no rounding.
        scale = _root_mean_square([_norm(tensor) for tensor in tensors.values()])
        for name, tensor in tensors.items():
            error = _norm(actual[kind][name].double() - tensor)
            allowed = _MULTIPLE * _norm(eager[kind][name].double() - tensor) + floor * scale
            if not error <= allowed:  # so that NaN fails
                return f"{kind} {name}".rstrip() + f" is off by {error:.3g}, {allowed:.3g} allowed"
    return None


def _check_stochastic(subject: Subject, device: torch.device, draw: Callable[[], Inputs]) -> Verdict:
    eager = Subject(_copy(subject.case), device)
    inputs = draw()  # the same for all: what is left to differ between evaluations is what the seed decides
    actual = _average(subject, inputs, first_seed=0)
    # No seed is used twice: with masks in common, two averages would lie closer than two random ones do.
    others = [_average(eager, inputs, first_seed=100 * (1 + index)) for index in range(_EAGER_AVERAGES)]
    wrong = _find_loss_difference(actual, others, FLOORS[subject.case.precision])
    if wrong:
        return Verdict(False, wrong)
    own = _root_mean_square([_distance(actual, other) for other in others])
    return _judge_ratio(own / _root_mean_square([_distance(*pair) for pair in combinations(others, 2)]))


def _judge_ratio(ratio: float) -> Verdict:
    low, high = _RATIO
    text = f"dropout: gradients lie {ratio:.2f} times as far from eager's as eager's under another seed"
    return Verdict(low <= ratio <= high, text)


@dataclass(frozen=True, slots=True)
class Average:
    """The losses under some seeds, and the sums of their gradients."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def _average(subject: Subject, inputs: Inputs, first_seed: int) -> Average:
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for seed in range(first_seed, first_seed + _STOCHASTIC_DRAWS):
        results = subject.results(inputs, seed)
        losses.append(results["output"][""].item())
        for name, gradient in results["gradient"].items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return Average(losses, gradients)


def _find_loss_difference(actual: Average, others: Sequence[Average], floor: float) -> str | None:
    losses = [loss for other in others for loss in other.losses]
    mean = statistics.fmean(losses)
    difference = abs(statistics.fmean(actual.losses) - mean)
    deviation = statistics.stdev(losses) / math.sqrt(len(actual.losses))
    allowed = _LOSS_DEVIATIONS * deviation + floor * abs(mean)
    return None if difference <= allowed else f"mean loss is off by {difference:.3g}, {allowed:.3g} allowed"


def _distance(one: Average, other: Average) -> float:
    if one.gradients.keys() != other.gradients.keys():
        # Beyond any bound, so that the step counts as wrong.
        return math.inf
    return math.hypot(*(_norm(one.gradients[name] - other.gradients[name]) for name in one.gradients))


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _copy(case: Case) -> Case:
    return dataclasses.replace(case, module=copy.deepcopy(case.module))


def _in_float64(case: Case) -> Case:
    return dataclasses.replace(case, module=case.module.double(), autocast=None)


def _inputs_in_float64(inputs: Inputs) -> Inputs:
    return {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()
    }


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values)) if values else 0.0
