"""Lists the operators that may be captured, as they do nothing on the host that later calls depend on.

A captured operator's host code runs once, when the graph is recorded. An operator that reads a Python variable, counts its calls or keeps
a workspace would hand out old results from then on. So an operator may be captured if it is one of PyTorch's or Inductor's, if it is
listed here, or if the user vouches for it by `PYGRAPH_GRAPH_OPS`. Every other one runs at each call, between graphs.

To add an entry: the operator's result must follow from its arguments and PyTorch's default generator alone, and all of its memory must
come from PyTorch's allocator. Imports no torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

OF_PYTORCH = frozenset(
    {
        "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_quantized", "aten", "c10d", "c10d_functional", "fsdp", "inductor",
        "inductor_prims", "mkl", "mkldnn", "onednn", "prim", "prims", "pygraphd", "quantized", "quantized_decomposed", "rngprims", "symm_mem",
    }
)  # fmt: skip
"""Namespaces of PyTorch, Inductor and PyGraph."""

OF_OTHERS = frozenset(
    {
        # By name: others of the library read results on the host, as `int8_double_quant` does.
        "bitsandbytes::dequantize_4bit",
        "bitsandbytes::dequantize_blockwise",
        "bitsandbytes::gemv_4bit",
        "DaoAILab::_causal_conv1d_bwd_cpp",
        "DaoAILab::_causal_conv1d_fwd_cpp",
        "flash_attn",
        "flash_attn_3",
        "torch_scatter",
        "torchvision",
        "xformers::efficient_attention_backward_cutlass",
        "xformers::efficient_attention_forward_cutlass",
        "xformers_flash",
        "xformers_flash3",
    }
)
"""Operators of popular libraries, by namespace or by name."""

WITH_HOST_CODE = frozenset(
    {
        "aten::_print", "aten::record_stream", "aten::resize_", "aten::set_", "inductor::accumulate_grad_", "inductor::resize_storage_bytes_",
    }
)  # fmt: skip
"""Operators of PyTorch that act on the host at each call: they print, or change a tensor's storage."""

WITH_LIBRARY_STATE = frozenset(
    {
        # cuFFT compiles kernels for a plan. PyTorch drops the plan, and with it the kernels, as its cache is cleared or full.
        "aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c",
        # MAGMA ends the process where it cannot allocate, as in a capture. cuSOLVER fails in later calls, too, after it has failed in a capture.
        "aten::_cholesky_solve_helper", "aten::_linalg_det", "aten::_linalg_eigh", "aten::_linalg_eigvals", "aten::_linalg_slogdet",
        "aten::_linalg_solve_ex", "aten::_linalg_svd", "aten::cholesky", "aten::cholesky_inverse", "aten::cholesky_solve", "aten::geqrf",
        "aten::linalg_cholesky_ex", "aten::linalg_eig", "aten::linalg_eigvals", "aten::linalg_householder_product", "aten::linalg_inv_ex",
        "aten::linalg_ldl_factor_ex", "aten::linalg_ldl_solve", "aten::linalg_lstsq", "aten::linalg_lu", "aten::linalg_lu_factor_ex",
        "aten::linalg_lu_solve", "aten::linalg_matrix_exp", "aten::linalg_pinv", "aten::linalg_qr", "aten::linalg_solve_triangular",
        "aten::ormqr", "aten::triangular_solve",
        # It reads on the host whether a decomposition has failed, and raises an error.
        "aten::_linalg_check_errors",
    }
)  # fmt: skip
"""Operators of PyTorch that call a library whose state a recording does not hold, or that a capture damages. They run at each call in
every mode, unless the user vouches for one in full."""

STREAMS = "streams"
"""The namespace of PyTorch's operators that act on streams and events of the program, which are not those of a capture or a replay."""

HIGHER_ORDER = "higher_order"
"""The namespace of operators that take functions."""

PURE_HIGHER_ORDER = frozenset(
    {
        "associative_scan", "auto_functionalized", "auto_functionalized_v2", "control_deps", "flex_attention", "flex_attention_backward",
        "foreach_map", "graphsafe_run_with_rng_state", "hints_wrapper", "inline_asm_elementwise", "invoke_quant", "invoke_quant_packed",
        "invoke_subgraph", "local_map_hop", "map_impl", "out_dtype", "strict_mode", "tag_activation_checkpoint",
        "triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation", "with_effects", "wrap", "wrap_activation_checkpoint",
        "wrap_with_autocast", "wrap_with_set_grad_enabled",
    }
)  # fmt: skip
"""Operators that take functions or an operator and run only these on the host; they are printed with the graph.

`cond` and `while_loop` are not among them: they read a condition on the host."""

HIDING_WRITES = frozenset(
    {
        "higher_order::associative_scan", "higher_order::hints_wrapper", "higher_order::invoke_quant", "higher_order::invoke_quant_packed",
        "higher_order::invoke_subgraph", "higher_order::local_map_hop", "higher_order::map_impl", "higher_order::strict_mode",
        "higher_order::tag_activation_checkpoint", "higher_order::wrap", "higher_order::wrap_activation_checkpoint",
        "higher_order::wrap_with_autocast", "higher_order::wrap_with_set_grad_enabled",
        # It appends to a cache of keys and values that its schema calls read-only.
        "flash_attn_3",
    }
)  # fmt: skip
"""Operators that are vouched for and may write to inputs of a graph which Inductor does not list as written. Most run a graph of their own."""

_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)?", re.ASCII)


def is_name(text: str) -> bool:
    """Return whether a text has the form `namespace` or `namespace::operator`."""
    return _NAME.fullmatch(text) is not None


def not_vouched(operators: Iterable[str], by_user: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the operators that neither this list nor the user vouches for, sorted; each is a `namespace::operator`."""
    vouched = OF_PYTORCH | OF_OTHERS | {*by_user}
    return tuple(sorted({each for each in operators if not _is_vouched(each, vouched)}))


def with_library_state(operators: Iterable[str], by_user: Iterable[str] = ()) -> frozenset[str]:
    """Return those of the operators that are in `WITH_LIBRARY_STATE`, and that the user does not vouch for."""
    return WITH_LIBRARY_STATE.intersection(operators).difference(by_user)


def _is_vouched(operator: str, vouched: frozenset[str]) -> bool:
    namespace, _, name = operator.partition("::")
    if namespace == HIGHER_ORDER:
        return name in PURE_HIGHER_ORDER or operator in vouched
    # Operators with host code count only if they are named in full: a namespace says too little of them.
    return operator in vouched or (namespace in vouched and operator not in WITH_HOST_CODE)


def hides_writes(operators: Iterable[str]) -> bool:
    """Return whether any of the operators may write to inputs that Inductor does not list as written."""
    return any(each in HIDING_WRITES or each.partition("::")[0] in HIDING_WRITES for each in operators)
