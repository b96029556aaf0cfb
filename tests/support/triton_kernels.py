"""Triton kernels as users write them; in a file, since Triton reads its source."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _double(source, target, n, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(target + offsets, tl.load(source + offsets, mask=mask) * 2, mask=mask)


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return `2 * x`."""
    out = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
    return out


KEY = 0x5555_5555_0000_0000
"""What hides an address: nothing that is an address, nor is in the way of its alignment."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy_hidden(hidden, target, n, KEY: tl.constexpr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: N803
    source = (hidden ^ KEY).to(tl.pointer_type(tl.float32))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)


@torch.library.custom_op("pygraph_tests::hidden", mutates_args=())  # type: ignore[untyped-decorator]
def hidden(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x`, by a kernel that is handed its address in a way that nobody can see."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    _copy_hidden[grid](x.data_ptr() ^ KEY, out, x.numel(), KEY=KEY, BLOCK=256)
    return out


@hidden.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
