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

_GETTERS: dict[str, tuple[str, ...]] = {
    "cudnn.enabled": ("_get_cudnn_enabled",),
    "cudnn.deterministic": ("_get_cudnn_deterministic",),
    "cudnn.conv.fp32_precision": ("_get_fp32_precision_getter", "cuda", "conv"),
    "cudnn.rnn.fp32_precision": ("_get_fp32_precision_getter", "cuda", "rnn"),
    "cuda.matmul.allow_fp16_accumulation": ("_get_cublas_allow_fp16_accumulation",),
}
"""The function of `torch._C` that reads each setting, with its arguments. `cudnn.allow_tf32` sets both precisions."""
_LIBRARY = r"\b(?:extern_kernels\.|torch\.ops\.aten\.)\w*"
_CALLS_CUDNN = re.compile(rf"{_LIBRARY}(?:conv|cudnn|batch_norm|rnn|ctc_loss)")
_CALLS_CUBLAS = re.compile(rf"{_LIBRARY}(?:mm|addmv|linear|matmul)")


def switches_of(code: str) -> tuple[str, ...]:
    """Return the names of the settings that library calls in generated code depend on."""
    calls = {"cudnn": _CALLS_CUDNN.search(code), "cuda": _CALLS_CUBLAS.search(code)}
    return tuple(name for name in _GETTERS if calls[name.partition(".")[0]])


def switches(names: Sequence[str]) -> tuple[Condition, ...]:
    """Return settings with their present values, without those that this torch does not have."""
    found: list[Condition] = []
    for function, *arguments in (_GETTERS[name] for name in names):
        read: Any = getattr(torch._C, function, None)
        read = functools.partial(read, *arguments) if read is not None and arguments else read
        if (value := _value(read)) is not None:
            found.append((read, value))
    return tuple(found)


def are_set(wanted: Sequence[Condition]) -> bool:
    """Return whether all settings have the values that they are to have."""
    return all(_value(read) == value for read, value in wanted)


def _value(read: Callable[[], object] | None) -> object:
    try:
        return read() if read is not None else None
    except (
        TypeError,
        RuntimeError,
    ):  # another version's arguments, or two ways of setting that contradict each other
        return None
