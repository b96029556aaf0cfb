"""`pygraphd::sent`, the operator by which a compiled graph gets small CPU values on the GPU: sent again when their bytes have changed.

It stands at the beginning of a graph, outside of what is captured, and runs at every call. Whether a value has changed is told
by its bytes, which are read at every call. A tensor's version is not enough: NumPy, `.data`, `ctypes` and other processes write
to memory and leave it as it is. Nor is its identity: what Python keeps as a number is a new tensor at every call. Reading a few
bytes takes the host less time than a call into PyTorch.

Values of one type go together, in one copy, when one of them has changed: what a copy takes of the host's time hardly depends
on how much it is. CUDA has taken what lies in pageable memory before the call that copies it returns, and does not wait for the GPU. It goes to
memory of PyTorch's allocator: a new piece for each change, so that nothing is written that a kernel or a saved activation may still read. The
piece before is let go first, so that in a steady state the address is the same: a graph whose inputs lie elsewhere at every call
has to be bound anew each time.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.common.report import Report

MAX_GRAPHS = 256
"""Graphs of which anything stays on the GPU."""
COPIES = 4
"""Copies of a graph's inputs that stay there: models may share a graph. The rule that makes inputs bounds them to 64 KiB a graph."""
ALIGNMENT = 64
"""Bytes; kernels that Inductor makes count on 16."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value is."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How much of memory it takes."""
        return int(math.prod(self.size) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Value:
    """What a value is, how many bytes it takes, which of all it is, and at which element of its piece it begins."""

    kind: Kind
    bytes: int
    index: int
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The values of one type, as they lie in a tensor of one dimension with `length` elements."""

    dtype: torch.dtype
    values: tuple[Value, ...]
    length: int


def kinds_text(values: Sequence[torch.Tensor]) -> str:
    """Return what tells the kinds of values; it is an argument of the operator, and part of its graph's hash."""
    return " ".join(
        f"{str(each.dtype).removeprefix('torch.')}[{','.join(map(str, each.size()))}]" for each in values
    )


@functools.cache
def pieces(text: str) -> tuple[Piece, ...]:
    """Return how values of the kinds that a text tells lie together: what the operator returns, a tensor for each."""
    by_type: dict[torch.dtype, list[Value]] = {}
    for index, each in enumerate(text.split()):
        name, _, sizes = each.removesuffix("]").partition("[")
        kind = Kind(getattr(torch, name), tuple(int(number) for number in sizes.split(",") if number))
        of_type = by_type.setdefault(kind.dtype, [])
        of_type.append(Value(kind, kind.bytes, index, _end(of_type)))
    return tuple(Piece(dtype, tuple(values), _end(values)) for dtype, values in by_type.items())


def _end(values: Sequence[Value]) -> int:
    """Return the first element after some values where another one may begin."""
    if not values:
        return 0
    step = ALIGNMENT // int(values[-1].kind.dtype.itemsize)
    return values[-1].start + -(-math.prod(values[-1].kind.size) // step) * step


@dataclass(frozen=True, slots=True)
class _Copy:
    """Values on the GPU: where they lay, and their bytes then."""

    pointers: tuple[int, ...]
    contents: tuple[bytes, ...]
    tensor: torch.Tensor


@dataclass(slots=True)
class _Kept:
    """The copies of one piece."""

    copies: tuple[_Copy, ...] = ()
    misses: int = 0
    """Calls in a row that found none."""

    def found(self, contents: tuple[bytes, ...]) -> torch.Tensor | None:
        """Return what was sent with these contents."""
        for each in self.copies:
            if each.contents == contents:
                self.misses = 0
                return each.tensor
        return None

    def make_room(self, pointers: tuple[int, ...]) -> None:
        """Let go of what came from the same places, of the oldest of too many, and of all if they are of no use."""
        self.misses += 1
        # Where a value was says nothing if the CPU has just computed it, or Python makes a tensor of a number.
        others = (each for each in self.copies if each.pointers != pointers)
        self.copies = tuple(others)[1 - COPIES :] if self.misses <= COPIES else ()


PINNED = "it lies in pinned memory, to which the GPU may still be writing, and is copied at every call"

Key = tuple[torch.device, int, str, str]
"""A device, a stream of it, the kinds of values, a graph."""


class Sender:
    """What lies on the GPU, and the bytes that were sent there."""

    def __init__(self, report: Callable[[], Report | None] = lambda: None) -> None:
        self.report = report
        self._kept: dict[Key, tuple[_Kept, ...]] = {}
        self._lines = BoundedLRU[str, tuple[str, ...]](MAX_GRAPHS)
        self._told: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        """Return how many copies are kept."""
        return sum(len(each.copies) for of_graph in self._kept.values() for each in of_graph)

    def note_lines(self, graph: str, lines: Sequence[str]) -> None:
        """Note of a graph which line of the user's takes each value, for what is to be said of these when it runs."""
        self._lines[graph] = tuple(lines)

    def send(
        self, values: list[torch.Tensor], device: torch.device, kinds: str, graph: str
    ) -> list[torch.Tensor]:
        """Return contiguous CPU values, which `kinds` tells, in their `pieces` on `device`, where nobody may write to them."""
        try:
            found = self._found_or_sent(values, device, kinds, graph)
        except Exception as error:  # noqa: BLE001 - within the user's call, which goes on with plain copies
            self._fail(error)
            found = None
        return found if found is not None else [_plainly(piece, values, device) for piece in pieces(kinds)]

    def _found_or_sent(
        self, values: list[torch.Tensor], device: torch.device, kinds: str, graph: str
    ) -> list[torch.Tensor] | None:
        """Return None if only a plain copy does what the program says."""
        if _is_captured(device):
            return None  # what is sent would be in the user's graph for good
        pointers = [value.data_ptr() if value.is_cpu and not value.is_pinned() else 0 for value in values]
        if not all(pointers):
            self._tell_pinned(values, kinds, graph)
            return None  # a copy to pinned memory may still be under way, and only the stream knows of it
        # Copies for each stream: the order of work on different ones is not known.
        together = pieces(kinds)
        kept = self._kept_of((device, _stream(device)(), kinds, graph), len(together))
        return [
            self._piece(each, piece, pointers, device) for each, piece in zip(kept, together, strict=True)
        ]

    def _tell_pinned(self, values: Sequence[torch.Tensor], kinds: str, graph: str) -> None:
        """Have the report say once of each value that it is copied at every call."""
        report = self.report()
        if report is None or len(self._told) >= MAX_GRAPHS:
            return
        for index, (value, text) in enumerate(zip(values, kinds.split(), strict=True)):
            if (graph, index) not in self._told and value.is_cpu and value.is_pinned():
                self._told.add((graph, index))
                line = "".join(self._lines.get(graph, ())[index : index + 1])
                report.leave_on_cpu(f"{text} of the CPU goes to the GPU: {PINNED}{line}")

    def _kept_of(self, key: Key, count: int) -> tuple[_Kept, ...]:
        """Return what is kept of each piece of a graph."""
        kept = self._kept.get(key)
        if kept is None:
            for oldest in list(self._kept)[: len(self._kept) - MAX_GRAPHS + 1]:
                self._kept.pop(oldest, None)
            kept = self._kept.setdefault(key, tuple(_Kept() for _ in range(count)))
        return kept

    def _piece(
        self, kept: _Kept, piece: Piece, pointers: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        contents = tuple(ctypes.string_at(pointers[each.index], each.bytes) for each in piece.values)
        sent = kept.found(contents)
        if sent is not None:
            return sent
        # Its memory may be what is allocated now. Threads that do so at once may lose a copy of each other's, and send it again.
        places = tuple(pointers[each.index] for each in piece.values)
        kept.make_room(places)
        tensor = _copied(piece, contents, device)
        kept.copies = (*kept.copies, _Copy(places, contents, tensor))
        if (report := self.report()) is not None:
            report.count(sent=1)
        return tensor

    def forget(self) -> None:
        """Give all memory back, and tell everything anew."""
        self._kept.clear()
        self._told.clear()

    def _fail(self, error: Exception) -> None:
        if (report := self.report()) is not None:
            report.fail(f"sending CPU values: {type(error).__name__}: {error}"[:200])


def _copied(piece: Piece, contents: Sequence[bytes], device: torch.device) -> torch.Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # further calls may be of a training
            return _copied(piece, contents, device)
    staging = torch.empty(piece.length, dtype=piece.dtype, device="cpu")
    start, itemsize = staging.data_ptr(), piece.dtype.itemsize
    for content, each in zip(contents, piece.values, strict=True):
        ctypes.memmove(start + each.start * itemsize, content, len(content))
    return staging.to(device, non_blocking=True, copy=True)


def _plainly(piece: Piece, values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the values of a piece by copies that each come in their turn on the stream."""
    there = torch.empty(piece.length, dtype=piece.dtype, device=device)
    for each in piece.values:
        value = values[each.index].detach()
        there[each.start : each.start + value.numel()] = value.reshape(-1)
    return there


@functools.cache
def _stream(device: torch.device) -> Callable[[], int]:
    return torch_private.current_stream(device)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and _capturing()()


@functools.cache
def _capturing() -> Callable[[], bool]:
    return torch_private.in_capture()


sender = Sender()
"""Of the process: code that Inductor has cached knows the operator alone."""


def _fake(values: list[Any], device: torch.device, kinds: str, graph: str) -> list[Any]:
    return [torch.empty(piece.length, dtype=piece.dtype, device=device) for piece in pieces(kinds)]


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
