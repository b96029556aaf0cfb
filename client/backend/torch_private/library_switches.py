"""Tells the settings of cuDNN and cuBLAS that a program may change between two calls, and on which the kernels of a call depend.

Dynamo compiles nothing again for them, or looks at them before the forward alone: the libraries read them at each call. A recording has the kernels that were chosen as it was made.
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

_Getter = tuple[str, ...]
_Switches = dict[str, tuple[re.Pattern[str], tuple[_Getter, ...]]]

_CALLED = re.compile(
    r"\b(?:extern_kernels\.|torch\.ops\.aten\.|aten\.(?=\w+\()|aoti_torch_cuda_|aoti_torch_call_dispatcher\(\"aten::)(\w+)"
)
"""Calls in generated code, in Python and in C++; comments name operators without parentheses."""
_OF_CUDNN = re.compile("conv|cudnn|batch_norm|rnn|ctc_loss")
_OF_CUBLAS = re.compile("mm|addmv|linear|matmul")
_ALWAYS: _Switches = {
    "cudnn.enabled": (_OF_CUDNN, (("_get_cudnn_enabled",),)),
    "cudnn.deterministic": (_OF_CUDNN, (("_get_cudnn_deterministic",),)),
    "cudnn.conv.fp32_precision": (re.compile("conv"), (("_get_fp32_precision_getter", "cuda", "conv"),)),
    "cudnn.rnn.fp32_precision": (re.compile("rnn"), (("_get_fp32_precision_getter", "cuda", "rnn"),)),
    "cuda.matmul.allow_fp16_accumulation": (_OF_CUBLAS, (("_get_cublas_allow_fp16_accumulation",),)),
}
"""For each setting, what is found in the names of library calls that depend on it, and its getters in `torch._C` with arguments.

The first getter that answers counts: that of TF32 raises where the program has set it by PyTorch's newer functions.

`cudnn.allow_tf32` sets both precisions. Each setting is read at each call, in 0.02 to 0.1 us."""
_IN_BACKWARDS: _Switches = {
    "cuda.matmul.allow_tf32": (
        _OF_CUBLAS,
        (("_get_cublas_allow_tf32",), ("_get_fp32_precision_getter", "cuda", "matmul")),
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        _OF_CUBLAS,
        (("_get_cublas_allow_bf16_reduced_precision_reduction",),),
    ),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (
        _OF_CUBLAS,
        (("_get_cublas_allow_fp16_reduced_precision_reduction",),),
    ),
    "deterministic_algorithms": (re.compile(""), (("_get_deterministic_algorithms",),)),
}
"""Settings for which Dynamo compiles a graph again as its forward is called: a program may change them between that and the backward."""
_SWITCHES: _Switches = _ALWAYS | _IN_BACKWARDS


def switches_of(code: str, *, is_backward: bool) -> tuple[str, ...]:
    """Return the names of the settings that library calls in generated code depend on."""
    called = set(_CALLED.findall(code))
    switches = _SWITCHES if is_backward else _ALWAYS
    return tuple(name for name, (used_by, _) in switches.items() if any(map(used_by.search, called)))


def switches(names: Sequence[str]) -> tuple[Condition, ...]:
    """Return settings with their present values, without those that this torch does not have."""
    found: list[Condition] = []
    for name in names:
        for function, *arguments in _SWITCHES[name][1]:
            read: Any = getattr(torch._C, function, None)
            # The compiled helper calls a condition without arguments.
            read = functools.partial(read, *arguments) if read is not None and arguments else read
            if (value := _value(read)) is not None:
                found.append((read, value))
                break
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
