"""The common parts of the suites' cases: precision, optimizer and comparison as in PyTorch's dashboard.

Inference computes in bfloat16, training in float32 under autocast. The dashboard compiles the whole step with its optimizer; here
the module alone is compiled, as in most programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.suites.accuracy import Accuracy
from benchmarks.suites.tables import LARGER_MULTIPLIER
from benchmarks.workloads import Mode
from benchmarks.workloads.case import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from benchmarks.workloads.case import Inputs, Model

ALMOST_NONE = 1e-30
"""A share of dropout that is computed, and drops nothing: results do not depend on the random state."""
_LEARNING_RATE = 1e-5
_DROPOUT = tuple(
    getattr(torch.nn, name)
    for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
)


def suite_case(
    module: torch.nn.Module,
    device: torch.device,
    mode: Mode,
    draw: Callable[[torch.Generator], Inputs],
    call: Callable[[Model, Inputs], Any],
    accuracy: tuple[str, float],
    *,
    autocast: bool = False,
) -> Case:
    """Return the case of a built module; `accuracy` is its name and tolerance. With `autocast`, inference runs under it, too."""
    training = mode is Mode.TRAINING
    # Not 0, at which the compiler would leave dropout out.
    for each in module.modules():
        if isinstance(each, _DROPOUT) and each.p > 0:
            each.p = ALMOST_NONE
    name, tolerance = accuracy
    return Case(
        module.train(training).requires_grad_(training),
        draw,
        call,
        precision=torch.bfloat16,
        optimizer=_optimizer_for(device) if training else None,
        autocast=torch.get_autocast_dtype(device.type) if training or autocast else None,
        check=Accuracy(tolerance, lenient=name in LARGER_MULTIPLIER).check,
    )


def _optimizer_for(
    device: torch.device,
) -> Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]:
    # A low rate, unlike the dashboard's: random weights and labels must not diverge before results are compared.
    on_gpu = device.type == "cuda"
    # As in the dashboard. `capturable` keeps Adam's counters on the GPU.
    return lambda parameters: torch.optim.Adam(parameters, lr=_LEARNING_RATE, capturable=on_gpu, foreach=True)
