"""Operators as users write them: of the driver's copies, of a kernel in CUDA C++, of a library, of an address that is hidden."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import torch

ONE = 0x3F800000
"""1.0 as a float."""


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoDAsync_v2.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
    driver.cuMemcpy2DAsync_v2.argtypes = (c_void_p, c_void_p)
    driver.cuMemsetD8Async.argtypes = (c_uint64, c_ubyte, c_size_t, c_void_p)
    driver.cuLaunchKernel.argtypes = (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
    driver.cuMemsetD32Async.argtypes = (c_uint64, c_uint, c_size_t, c_void_p)
    return driver


def _stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


@torch.library.custom_op("pygraph_tests::copied", mutates_args=())  # type: ignore[untyped-decorator]
def copied(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, as many zeros and as many ones, one after the other: a copy node and two memset nodes."""
    out = x.new_empty(3, *x.size())
    driver, stream, size = _driver(), _stream(), x.nbytes
    assert driver.cuMemcpyDtoDAsync_v2(out.data_ptr(), x.data_ptr(), size, stream) == 0
    assert driver.cuMemsetD8Async(out.data_ptr() + size, 0, size, stream) == 0
    assert driver.cuMemsetD32Async(out.data_ptr() + 2 * size, ONE, x.numel(), stream) == 0
    return out


@copied.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(3, *x.size())


def _side(side: str) -> tuple[tuple[str, Any], ...]:
    return (
        (f"{side}XInBytes", c_size_t),
        (f"{side}Y", c_size_t),
        (f"{side}MemoryType", c_int),
        (f"{side}Host", c_void_p),
        (f"{side}Device", c_uint64),
        (f"{side}Array", c_void_p),
        (f"{side}Pitch", c_size_t),
    )


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2; sizes in bytes."""

    _fields_ = (*_side("src"), *_side("dst"), ("WidthInBytes", c_size_t), ("Height", c_size_t))


@torch.library.custom_op("pygraph_tests::first_columns", mutates_args=())  # type: ignore[untyped-decorator]
def first_columns(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first columns of a matrix: a copy node of two dimensions."""
    out = x.new_empty(x.size(0), count)
    device = 2  # CU_MEMORYTYPE_DEVICE
    copy = _Copy2D(
        srcMemoryType=device,
        srcDevice=x.data_ptr(),
        srcPitch=x.stride(0) * x.element_size(),
        dstMemoryType=device,
        dstDevice=out.data_ptr(),
        dstPitch=count * x.element_size(),
        WidthInBytes=count * x.element_size(),
        Height=x.size(0),
    )
    assert _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), _stream()) == 0
    return out


@first_columns.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty(x.size(0), count)


TRIPLED = """
extern "C" __global__ void tripled(const float* source, float* target, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) target[i] = 3 * source[i];
}
"""


@functools.cache
def _tripled() -> Any:
    return torch.cuda._compile_kernel(TRIPLED, "tripled")


@torch.library.custom_op("pygraph_tests::tripled", mutates_args=())  # type: ignore[untyped-decorator]
def tripled(x: torch.Tensor) -> torch.Tensor:
    """Return `3 * x`, by a kernel in CUDA C++ that is compiled here."""
    out = torch.empty_like(x)
    grid = (-(-x.numel() // 128), 1, 1)
    _tripled()(grid=grid, block=(128, 1, 1), args=[x, out, x.numel()])
    return out


@tripled.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


LEADING = """
struct Given { const float* source; int n; unsigned gap; };
extern "C" __global__ void leading(Given given, float* target, int room) {
    int i = threadIdx.x;
    if (given.n == room && i < given.n) target[i] = given.source[i];
}
"""


class _Given(ctypes.Structure):
    _fields_ = (("source", c_uint64), ("n", c_int), ("gap", c_uint))


@functools.cache
def _leading() -> Any:
    return torch.cuda._compile_kernel(LEADING, "leading")


@torch.library.custom_op("pygraph_tests::leading", mutates_args=())  # type: ignore[untyped-decorator]
def leading(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return `x[:n]`, by a kernel that is given a structure in whose gap the upper half of the input's address was left."""
    out = x.new_empty(n)
    given, target, room = _Given(x.data_ptr(), n, x.data_ptr() >> 32), c_uint64(out.data_ptr()), c_int(n)
    parameters = (c_void_p * 3)(*map(ctypes.addressof, (given, target, room)))
    code = _driver().cuLaunchKernel(_leading().func, 1, 1, 1, n, 1, 1, 0, _stream(), parameters, None)
    assert code == 0
    return out


@leading.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.new_empty(n)


AFFINE = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>
at::Tensor affine(const at::Tensor& x) { return at::add(at::mul(x, 2), 1); }
TORCH_LIBRARY(pygraph_cpp_tests, library) { library.def("affine(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(pygraph_cpp_tests, CompositeExplicitAutograd, library) { library.impl("affine", affine); }
"""
"""An operator in C++ that Inductor cannot look into."""


def affine_in_cpp(folder: str) -> Any:
    """Return an operator in C++, compiled in a folder: `2 * x + 1`."""
    from torch.utils import cpp_extension

    cpp_extension.load_inline(
        "pygraph_cpp_tests",
        AFFINE,
        extra_cflags=["-O0"],
        build_directory=folder,
        is_python_module=False,
        no_implicit_headers=True,
        with_cuda=False,
    )
    return torch.ops.pygraph_cpp_tests.affine


@torch.library.custom_op("pygraph_tests::lstm", mutates_args=())  # type: ignore[untyped-decorator]
def lstm(
    x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor
) -> torch.Tensor:
    """Return what a layer makes of (steps, batch, features): cuDNN's, which Dynamo would take apart."""
    state = x.new_zeros(1, x.size(1), w_hh.size(1))
    weights = [w_ih, w_hh, b_ih, b_hh]
    output: torch.Tensor = torch._VF.lstm(x, (state, state), weights, True, 1, 0.0, False, False, False)[0]
    return output


@lstm.register_fake  # type: ignore[untyped-decorator]
def _(
    x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(x.size(0), x.size(1), w_hh.size(1))
