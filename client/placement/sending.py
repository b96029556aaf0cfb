"""`pygraphd::sent`, the operator by which a compiled graph gets small CPU values on the GPU: sent again when their bytes have changed.

It stands at the beginning of a graph, outside of what is captured, and runs at every call. Whether a value has changed is told
by its bytes, which are read at every call. A tensor's version is not enough: NumPy, `.data`, `ctypes` and other processes write
to memory and leave it as it is. Nor is its identity: what Python keeps as a number is a new tensor at every call. Reading a few
bytes takes the host less time than a call into PyTorch.

What is sent lies in pinned memory of PyTorch's, which it does not hand out again before the copy is done, and goes to memory of
its allocator's: a new piece for each change, so that nothing is written that a kernel or a saved activation may still read. The
piece before is let go first, so that in a steady state the address is the same.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client import _torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.report import Report

MAX_GRAPHS = 256
"""Graphs of which anything stays on the GPU."""
COPIES = 4
"""Copies of one input that stay there: models may share a graph. The rule that makes inputs bounds them to 64 KiB a graph."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value is."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How much of memory it takes."""
        return int(math.prod(self.size) * self.dtype.itemsize)


def kinds_text(values: Sequence[torch.Tensor]) -> str:
    """Return what tells the kinds of values; it is an argument of the operator, and part of its graph's hash."""
    return " ".join(
        f"{str(each.dtype).removeprefix('torch.')}[{','.join(map(str, each.size()))}]" for each in values
    )


@functools.cache
def _kinds(text: str) -> tuple[tuple[Kind, int], ...]:
    """Return kinds, and the bytes of each."""
    kinds = []
    for each in text.split():
        name, _, sizes = each.removesuffix("]").partition("[")
        kinds.append(Kind(getattr(torch, name), tuple(int(number) for number in sizes.split(",") if number)))
    return tuple((kind, kind.bytes) for kind in kinds)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A value on the GPU: where it lay, and its bytes then."""

    pointer: int
    content: bytes
    tensor: torch.Tensor


Key = tuple[object, ...]
"""A device, a stream of it, a graph."""


class Sender:
    """What lies on the GPU, and the bytes that were sent there."""

    def __init__(self, report: Callable[[], Report | None] = lambda: None) -> None:
        self.report = report
        self._copies: dict[Key, list[tuple[_Copy, ...]]] = {}

    def __len__(self) -> int:
        """Return how many copies are kept."""
        return sum(len(copies) for inputs in self._copies.values() for copies in inputs)

    def send(
        self, values: list[torch.Tensor], device: torch.device, kinds: str, graph: str
    ) -> list[torch.Tensor]:
        """Return contiguous CPU values, which `kinds` tells, on `device`, where nobody may write to them."""
        try:
            found = self._found_or_sent(values, device, kinds, graph)
        except Exception as error:  # noqa: BLE001 - within the user's call, which goes on with plain copies
            self._fail(error)
            found = None
        return found if found is not None else [each.to(device, copy=True) for each in values]

    def _found_or_sent(
        self, values: list[torch.Tensor], device: torch.device, kinds: str, graph: str
    ) -> list[torch.Tensor] | None:
        """Return None if only a plain copy does what the program says."""
        if _is_captured(device):
            return None  # what is sent would be in the user's graph for good
        # Copies for each stream: the order of work on different ones is not known.
        inputs = self._inputs((device, _stream(device)(), kinds, graph), len(values))
        found = []
        for index, (value, (kind, size)) in enumerate(zip(values, _kinds(kinds), strict=True)):
            pointer = value.data_ptr() if value.is_cpu else 0
            if not pointer or value.is_pinned():
                return None  # a copy to pinned memory may still be under way, and only the stream knows of it
            content = ctypes.string_at(pointer, size)
            sent = _found(inputs[index], content)
            found.append(self._send(inputs, index, kind, pointer, content, device) if sent is None else sent)
        return found

    def _inputs(self, key: Key, count: int) -> list[tuple[_Copy, ...]]:
        """Return the copies of each input of a graph."""
        inputs = self._copies.get(key)
        if inputs is None:
            for oldest in list(self._copies)[: len(self._copies) - MAX_GRAPHS + 1]:
                self._copies.pop(oldest, None)
            inputs = self._copies.setdefault(key, [()] * count)
        return inputs

    def _send(
        self,
        inputs: list[tuple[_Copy, ...]],
        index: int,
        kind: Kind,
        pointer: int,
        content: bytes,
        device: torch.device,
    ) -> torch.Tensor:
        # What came from the same place, or is the oldest of too many, goes first: its memory may be what is allocated now. Threads
        # that do so at once may lose a copy of each other's, and send it again.
        kept = tuple(each for each in inputs[index] if each.pointer != pointer)[1 - COPIES :]
        inputs[index] = kept
        tensor = _copied(kind, content, device)
        inputs[index] = (*kept, _Copy(pointer, content, tensor))
        if (report := self.report()) is not None:
            report.count(sent=1)
        return tensor

    def forget(self) -> None:
        """Give all memory back."""
        self._copies.clear()

    def _fail(self, error: Exception) -> None:
        if (report := self.report()) is not None:
            report.fail(f"sending CPU values: {type(error).__name__}: {error}"[:200])


def _found(copies: tuple[_Copy, ...], content: bytes) -> torch.Tensor | None:
    for each in copies:
        if each.content == content:
            return each.tensor
    return None


def _copied(kind: Kind, content: bytes, device: torch.device) -> torch.Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # further calls may be of a training
            return _copied(kind, content, device)
    staging = torch.empty(kind.size, dtype=kind.dtype, device="cpu", pin_memory=device.type == "cuda")
    ctypes.memmove(staging.data_ptr(), content, len(content))
    return staging.to(device, non_blocking=True, copy=True)


@functools.cache
def _stream(device: torch.device) -> Callable[[], int]:
    return _torch.current_stream(device)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and _capturing()()


@functools.cache
def _capturing() -> Callable[[], bool]:
    return _torch.in_capture()


sender = Sender()
"""Of the process: code that Inductor has cached knows the operator alone."""


def _fake(values: list[Any], device: torch.device, kinds: str, graph: str) -> list[Any]:
    return [torch.empty_like(each, device=device) for each in values]


_library = torch.library.Library("pygraphd", "FRAGMENT")
# The tag has Inductor keep it out of what is captured.
_library.define(
    "sent(Tensor[] values, Device device, str kinds, str graph) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.impl("sent", sender.send, "CPU")
# A backward may be given on the GPU what it was compiled for as a CPU value: the forward has saved the one that it has copied.
_library.impl("sent", sender.send, "CUDA")
torch.library.register_fake("pygraphd::sent", _fake, lib=_library)
SENT = torch.ops.pygraphd.sent.default
