"""Makes, views and copies tensors below the checks of torch's public functions, and connects the helper in C to libtorch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch

from pygraphd.client.backend.torch_private.profiling import profiler_flags
from pygraphd.client.backend.torch_private.requirements import lacking

Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def allocator(device: torch.device) -> Allocator:
    """Return a function of (size, strides, dtype) that makes an uninitialised tensor on `device`. A CUDA device has to be current in calls."""
    if device.type == "cuda":
        fast: Any = torch._C._dynamo.guards._empty_strided_cuda
        return cast("Allocator", fast)
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


@contextlib.contextmanager
def allocations_by(allocate: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have Inductor's code in this thread allocate CUDA memory by `allocate(original, size, strides, dtype)`."""
    original: Any = torch._C._dynamo.guards._empty_strided_cuda
    mine = threading.get_ident()

    def chosen(*arguments: Any) -> torch.Tensor:
        # Other threads may run the same modules meanwhile.
        return allocate(original, *arguments) if threading.get_ident() == mine else original(*arguments)

    # Each module that Inductor generates binds the function to a global: replacing torch's changes nothing.
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    # A copy of the list: another thread may load generated code meanwhile.
    modules = [vars(each) for each in list(codecache.PyCodeCache.modules)]
    names = [each for each in modules if each.get("empty_strided_cuda") is original]
    for each in names:
        each["empty_strided_cuda"] = chosen
    try:
        yield
    finally:
        for each in names:
            each["empty_strided_cuda"] = original


def reinterpret(
    tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor over the storage of `tensor` that is no view to autograd; `offset` is in elements of `dtype`."""
    same = tensor if tensor.dtype == dtype else tensor.view(dtype)
    made: torch.Tensor = torch._C._dynamo.guards._reinterpret_tensor(same, size, stride, offset)
    return made


def viewed_like(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of `plain` with the conjugate and negative bits of `like`."""
    if like.is_conj():
        plain = torch._conj(plain)
    return torch._neg_view(plain) if like.is_neg() else plain


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, without autograd."""
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_type.setdefault(source.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    with torch.no_grad():
        for targets, sources in by_type.values():
            torch._foreach_copy_(targets, sources)


def memory_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of bytes over memory that it does not own; `size` is in bytes."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    owned_elsewhere: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, 0, (size,), (1,)
    )
    return owned_elsewhere


_LIBTORCH = (
    ("libtorch_cpu.so", "aoti_torch_get_data_ptr"),
    ("libtorch_cpu.so", "aoti_torch__reinterpret_tensor"),
    ("libtorch_cpu.so", "aoti_torch_view_dtype"),
    ("libtorch_cpu.so", "aoti_torch_delete_tensor_object"),
    ("libtorch_python.so", "_Z16THPVariable_WrapON2at10TensorBaseE"),
)
"""Functions that the helper calls: libtorch's stable C interface, and `THPVariable_Wrap(at::TensorBase&&)`."""


_LIBTORCH_CUDA = ("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream")


def stream_function(device: torch.device) -> tuple[int, int]:
    """Return the address of an int32 (*)(int32 device_index, void **stream), which tells the current stream, and the index; (0, 0) for the CPU."""
    return (_function(*_LIBTORCH_CUDA) or 0, device.index) if device.type == "cuda" else (0, 0)


@functools.cache
def missing_for_helper() -> str | None:
    """Return why the helper cannot be used with this torch, or None."""
    if _handle_offset() is None:
        return f"torch {torch.__version__} keeps tensors in a way that is not known"
    needed = (*_LIBTORCH, _LIBTORCH_CUDA) if torch.version.cuda else _LIBTORCH
    names = [name for library, name in needed if _function(library, name) is None]
    return lacking({}, names)


def configure_helper(helper: Any) -> str | None:
    """Give the helper the addresses and offsets of this torch, and try it; return why it cannot be used, or None."""
    functions = (_function(library, name) for library, name in _LIBTORCH)
    helper.configure(torch._C.TensorBase, _handle_offset(), *profiler_flags(), *functions)
    with _without_modes_of_the_user():
        tensors = _own_tensors()
        plan = helper.plan([(0, 0, dtype_code(torch.int16), 3, (2, 1), (1, 7))])
        (made,) = helper.fill(plan, tensors, [], [None])
        expected = reinterpret(tensors[0], torch.int16, (2, 1), (1, 7), 3)
        # Neither the offset nor `THPVariable_Wrap` belongs to a stable interface, so a result is looked at.
        same = made.dtype == expected.dtype and all(
            getattr(made, name)() == getattr(expected, name)() for name in ("size", "stride", "data_ptr")
        )
    return None if same else "it does not make the tensors that it should"


@functools.cache
def _handle_offset() -> int | None:
    """Return the offset in bytes, within a Python tensor, of the pointer to its C++ implementation; None if it is not found."""
    tensors = _own_tensors()
    word = ctypes.sizeof(ctypes.c_void_p)
    for offset in range(object.__basicsize__, torch._C.TensorBase.__basicsize__ - word + 1, word):
        # Several tensors: in one alone, another word might hold the same address by chance.
        words = [ctypes.c_void_p.from_address(id(tensor) + offset).value for tensor in tensors]
        if words == [tensor._cdata for tensor in tensors]:
            return offset
    return None


@functools.cache
def dtype_code(dtype: torch.dtype | None) -> int:
    """Return the code of a dtype in libtorch's stable C interface, -1 for None; raises LookupError if it has none."""
    if dtype is None:
        return -1
    address = _function("libtorch_cpu.so", f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")
    if address is None:
        raise LookupError(f"torch {torch.__version__} has no code for {dtype}")
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(address)())


def _function(library: str, name: str) -> int | None:
    """Return the address of a function in a library of torch, or None."""
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / library))
        return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _own_tensors() -> list[torch.Tensor]:
    """Return CPU tensors of several kinds, whatever modes the user has set."""
    with _without_modes_of_the_user():
        plain = torch.zeros(4, device="cpu")
        return [plain, plain[1:], torch.nn.Parameter(torch.zeros(2, device="cpu")), plain.clone()]


@contextlib.contextmanager
def _without_modes_of_the_user() -> Iterator[None]:
    with (
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),
        torch.utils._python_dispatch._disable_current_modes(),
    ):
        yield
