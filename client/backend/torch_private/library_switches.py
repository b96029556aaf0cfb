"""Tells the settings of cuDNN and cuBLAS that a program may change between two calls, and on which the kernels of a call depend.

Dynamo compiles nothing again for them: the libraries read them at each call. A recording has the kernels that were chosen as it was made.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Condition = tuple["Callable[[], object]", object]
"""A function in C that reads a setting, and the value that it is to have."""

_CALLED = re.compile(r"\b(?:extern_kernels|torch\.ops\.aten)\.(\w+)")
_OF_CUDNN = re.compile("conv|cudnn|batch_norm|rnn|ctc_loss")
_SWITCHES: dict[str, tuple[re.Pattern[str], tuple[str, ...]]] = {
    "cudnn.enabled": (_OF_CUDNN, ("_get_cudnn_enabled",)),
    "cudnn.deterministic": (_OF_CUDNN, ("_get_cudnn_deterministic",)),
    "cudnn.conv.fp32_precision": (re.compile("conv"), ("_get_fp32_precision_getter", "cuda", "conv")),
    "cudnn.rnn.fp32_precision": (re.compile("rnn"), ("_get_fp32_precision_getter", "cuda", "rnn")),
    "cuda.matmul.allow_fp16_accumulation": (
        re.compile("mm|addmv|linear|matmul"),
        ("_get_cublas_allow_fp16_accumulation",),
    ),
}
"""For each setting, what is found in the names of library calls that depend on it, and its getter in `torch._C` with arguments.

`cudnn.allow_tf32` sets both precisions. Each setting is read at each call, in 0.05 to 0.3 us."""


def switches_of(code: str) -> tuple[str, ...]:
    """Return the names of the settings that library calls in generated code depend on."""
    called = set(_CALLED.findall(code))
    return tuple(name for name, (used_by, _) in _SWITCHES.items() if any(map(used_by.search, called)))


def switches(names: Sequence[str]) -> tuple[Condition, ...]:
    """Return settings with their present values, without those that this torch does not have."""
    found: list[Condition] = []
    for function, *arguments in (_SWITCHES[name][1] for name in names):
        read: Any = getattr(torch._C, function, None)
        # The compiled helper calls a condition without arguments.
        read = functools.partial(read, *arguments) if read is not None and arguments else read
        if (value := _value(read)) is not None:
            found.append((read, value))
    return tuple(found)


def are_set(wanted: Sequence[Condition]) -> bool:
    """Return whether all settings have the values that they are to have."""
    return all(_value(read) == value for read, value in wanted)


def _value(read: Callable[[], object] | None) -> object:
    # Another version may take other arguments, and two ways of setting may contradict each other.
    try:
        return read() if read is not None else None
    except (TypeError, RuntimeError):
        return None
