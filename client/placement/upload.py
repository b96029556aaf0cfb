"""`pygraphd::sent`, the operator that gives a compiled graph its small CPU values on the GPU: it sends those whose bytes have changed.

It stands at the beginning of a graph, outside of the captured partitions, and runs at every call. It compares bytes, which is cheaper than a
call into PyTorch: NumPy, `.data`, `ctypes` and other processes write without changing a tensor's version, and a Python number is a new
tensor at every call.

Values of one dtype are packed into one copy, since its host time hardly depends on its size. From pageable memory it does not wait for the
GPU. Each copy is a new allocation, so that nothing is written that a kernel or a saved activation may still read. The previous copy is
released first: in steady state the new one has the same address, and no recording has to be relocated.

`pygraphd::staged` copies a few scalars to pinned memory at every call; the graph copies them on to the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.common.signals import raised_by_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.common.report import Report

MAX_COPIED_GRAPHS = 256
"""The most graphs whose copies are kept on the GPU; `inputs.py` bounds the values of a graph."""
ALIGNMENT = 64
"""Alignment of each value in a pack, in bytes; Inductor's kernels assume 16."""


@dataclass(frozen=True, slots=True)
class PackedValue:
    """One value of a pack: its index among all values, its first element in the pack, and its size in elements and in bytes."""

    index: int
    start: int
    length: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Pack:
    """The values of one dtype, as they lie in a 1-d tensor of `length` elements."""

    dtype: torch.dtype
    values: tuple[PackedValue, ...]
    length: int


def specs_text(values: Sequence[torch.Tensor]) -> str:
    """Return the specs of values as text: an argument of the operator, and so a part of the graph's hash."""
    return " ".join(
        f"{str(each.dtype).removeprefix('torch.')}[{','.join(map(str, each.size()))}]" for each in values
    )


@functools.lru_cache(maxsize=1024)
def packs(text: str) -> tuple[Pack, ...]:
    """Return the packs of values whose specs are given as text; the operator returns one tensor for each."""
    by_type: dict[torch.dtype, list[PackedValue]] = {}
    for index, each in enumerate(text.split()):
        name, _, sizes = each.removesuffix("]").partition("[")
        dtype, length = getattr(torch, name), math.prod(int(number) for number in sizes.split(",") if number)
        values = by_type.setdefault(dtype, [])
        values.append(PackedValue(index, _end(values, dtype), length, length * dtype.itemsize))
    return tuple(Pack(dtype, tuple(values), _end(values, dtype)) for dtype, values in by_type.items())


def _end(values: Sequence[PackedValue], dtype: torch.dtype) -> int:
    """Return the first aligned element after the given values."""
    if not values:
        return 0
    step = ALIGNMENT // int(dtype.itemsize)
    return values[-1].start + -(-values[-1].length // step) * step


@dataclass(frozen=True, slots=True)
class _Copy:
    """A pack on the GPU, with the bytes of its values when they were sent."""

    contents: tuple[bytes, ...]
    tensor: torch.Tensor


_Key = tuple[torch.device, int, str, str]
"""Device, stream, specs of the values, name of the graph."""


class Sender:
    """Sends values, and keeps the latest copy of each pack of a graph. Safe to call from several threads."""

    def __init__(self, report: Callable[[], Report | None] = lambda: None) -> None:
        self.report = report
        self._copies = BoundedLRU[_Key, dict[torch.dtype, _Copy]](MAX_COPIED_GRAPHS)

    def __len__(self) -> int:
        """Return the number of copies that are kept."""
        return sum(map(len, self._copies.values()))

    def send(
        self, values: list[torch.Tensor], device: torch.device, specs: str, graph: str
    ) -> list[torch.Tensor]:
        """Return the packs of contiguous CPU values on `device`, read-only: by plain copies after an error of its own, which it never raises."""
        try:
            if (found := self._cached_or_sent(values, device, specs, graph)) is not None:
                return found
        except Exception as error:
            if raised_by_handler(error):
                raise
            # The user's call goes on with plain copies.
            if (report := self.report()) is not None:
                report.count_failure(f"sending CPU values: {type(error).__name__}: {error}"[:200])
        is_captured = _is_captured(device)
        return [_copy_each(pack, values, device, is_captured=is_captured) for pack in packs(specs)]

    def _cached_or_sent(
        self, values: list[torch.Tensor], device: torch.device, specs: str, graph: str
    ) -> list[torch.Tensor] | None:
        """Return the packs from the cache or newly sent; None if the values must be copied plainly on the stream."""
        if _is_captured(device):
            return None  # the user's graph would replay today's bytes
        pointers = [value.data_ptr() if value.is_cpu and not value.is_pinned() else 0 for value in values]
        if not all(pointers):
            return None  # the GPU may still be writing to pinned memory, in the order of the stream
        # Copies for each stream: work on different streams is not ordered.
        key = device, torch_private.current_stream(device)(), specs, graph
        if (copies := self._copies.get(key)) is None:
            self._copies[key] = copies = {}
        return [self._send_pack(copies, pack, pointers, device) for pack in packs(specs)]

    def _send_pack(
        self, copies: dict[torch.dtype, _Copy], pack: Pack, pointers: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        contents = tuple(ctypes.string_at(pointers[each.index], each.bytes) for each in pack.values)
        kept = copies.get(pack.dtype)
        if kept is not None and kept.contents == contents:
            return kept.tensor
        # The memory may be allocated again just below. Concurrent threads may drop each other's copies, and send them again.
        del kept
        copies.pop(pack.dtype, None)
        tensor = _copy_packed(pack, contents, device)
        copies[pack.dtype] = _Copy(contents, tensor)
        if (report := self.report()) is not None:
            report.count(sent=1)
        return tensor

    def clear(self) -> None:
        """Release all copies."""
        self._copies.clear()


def _copy_packed(pack: Pack, contents: Sequence[bytes], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # a later call may be a training step
        staging = torch.empty(pack.length, dtype=pack.dtype, device="cpu")
        start, itemsize = staging.data_ptr(), pack.dtype.itemsize
        for content, each in zip(contents, pack.values, strict=True):
            ctypes.memmove(start + each.start * itemsize, content, len(content))
        return staging.to(device, non_blocking=True, copy=True)


def _copy_each(
    pack: Pack, values: Sequence[torch.Tensor], device: torch.device, *, is_captured: bool
) -> torch.Tensor:
    """Return a pack made by one copy for each value, in the order of the stream, which may be captured by the program.

    A captured copy must not wait, and each replay of the program's graph makes it again. So it reads pinned memory, which PyTorch's
    allocator gives to nobody else if it was allocated in a capture.
    """
    there = torch.empty(pack.length, dtype=pack.dtype, device=device)
    for each in pack.values:
        value = values[each.index].detach().reshape(-1)
        if is_captured and value.is_cpu and not value.is_pinned():
            value = value.pin_memory()
        there[each.start : each.start + each.length].copy_(value, non_blocking=is_captured)
    return there


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch_private.in_capture()())


sender = Sender()
"""The sender of the process: cached code of Inductor's reaches it through the operator."""


def _stage(scalars: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the values of 0-d CPU tensors of one dtype in new memory, which is pinned if `device` is a GPU."""
    memory = torch.empty(len(scalars), dtype=scalars[0].dtype, pin_memory=device.type == "cuda")
    return torch.stack(scalars, out=memory)


def _fake(values: list[Any], device: torch.device, specs: str, graph: str) -> list[Any]:
    return [torch.empty(pack.length, dtype=pack.dtype, device=device) for pack in packs(specs)]


_library = torch.library.Library("pygraphd", "FRAGMENT")
# The tag keeps the operator out of captured partitions.
_library.define(
    "sent(Tensor[] values, Device device, str specs, str graph) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.impl("sent", sender.send, "CPU")
# A backward compiled for a CPU value may receive it on the GPU, where its forward saved the copy.
_library.impl("sent", sender.send, "CUDA")
torch.library.register_fake("pygraphd::sent", _fake, lib=_library)
SENT = torch.ops.pygraphd.sent.default
# Code of Inductor's for the same copy would be C++: without it, a graph that runs on the GPU alone needs no C++ compiler.
_library.define("staged(Tensor[] scalars, Device device) -> Tensor")
_library.impl("staged", _stage, "CPU")
# In a backward, as `sent`.
_library.impl("staged", lambda scalars, device: _stage([each.cpu() for each in scalars], device), "CUDA")
torch.library.register_fake("pygraphd::staged", lambda scalars, device: torch.stack(scalars), lib=_library)
STAGED = torch.ops.pygraphd.staged.default
