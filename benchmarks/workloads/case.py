"""What a built workload consists of: a module, how it is called, what it is fed, and how it is trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.errors import BenchmarkError

Inputs = Mapping[str, torch.Tensor]
Model = Callable[..., Any]
"""The module, or what torch.compile made of it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on a device.

    `draw` makes new inputs on the device. `call` runs the model as its users do and returns one tensor: the loss in
    training, otherwise the output. `precision` is the least precise type computed in. A `stochastic` case (dropout)
    gives another result with every state of the random number generator.

    With a `check` of its own a case compares a step with eager in its own way; `call` may return any structure of tensors
    in inference then.
    """

    module: torch.nn.Module
    draw: Callable[[torch.Generator], Inputs]
    call: Callable[[Model, Inputs], Any]
    precision: torch.dtype
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    autocast: torch.dtype | None = None
    stochastic: bool = False
    check: Callable[..., Any] | None = None
    """Called as `benchmarks.correctness.check` is, and returns a `Verdict`."""


def cpu_generator(generator: torch.Generator) -> torch.Generator:
    """Return a generator on the CPU, for inputs that are there, which the state of the other decides."""
    seed = torch.randint(2**62, (), device=generator.device, generator=generator)
    return torch.Generator().manual_seed(int(seed))


def require(library: str) -> Any:
    """Import a library that only some workloads need."""
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        # What is missing may be a module that the library needs itself, so that the message has both.
        raise BenchmarkError(
            f"this workload needs {library}, which is not installed here ({error})"
        ) from error
