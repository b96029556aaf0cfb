"""Makes the outputs of a call: each is an allocation, an input, or a new tensor over the memory of one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.native.ffi import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Fixed:
    """An output that is the same object at every call: None, a number, or a constant of the module."""

    value: Any


@dataclass(frozen=True, slots=True)
class Empty:
    """An output without elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Input:
    """An output that is one of the inputs."""

    index: int


@dataclass(frozen=True, slots=True)
class View:
    """An output that is a view of an input; `offset` in elements of `dtype`, from where the input begins."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    keeps_dtype: bool = False
    """Whether the input has the same dtype."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An output that is a whole allocation of the call."""

    memory: int


@dataclass(frozen=True, slots=True)
class Part:
    """An output that lies in an allocation of the call; `offset` in elements of `dtype`."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Flagged:
    """An output that is a conjugate or negative view of a part."""

    of: Part
    like: torch.Tensor
    """A tensor without elements that is such a view."""


@dataclass(frozen=True, slots=True)
class Same:
    """An output that is an earlier output: the same object, as where two gradients are one tensor.

    Autograd takes over a gradient that nobody else refers to, and copies any other. Two objects over one memory would be taken over both.
    """

    index: int


Output = Fixed | Empty | Input | View | Whole | Part | Flagged | Same
"""How one output is made at each call."""


class Outputs:
    """All outputs of a recording. Allocations and inputs are returned as they are; the other outputs are made at each call."""

    def __init__(self, outputs: Sequence[Output], dtypes: Sequence[torch.dtype], *, as_tuple: bool) -> None:
        """Describe the outputs of calls; `dtypes` are those of the allocations."""
        outputs = [_constant(outputs, each) or each for each in outputs]
        self.all = tuple(outputs)
        self._as_tuple = as_tuple
        self.blank = [each.value if isinstance(each, Fixed) else None for each in outputs]
        """For each output the object that it is at each call, or None."""
        pieces: list[Piece | None] = []
        for index, each in enumerate(outputs):
            if isinstance(each, Same) and pieces[each.index] is not None:
                pieces.append(Piece(index, each.index, is_output=True))
            else:
                pieces.append(_piece(index, each, dtypes))
        self.pieces = [piece for piece in pieces if piece is not None]
        """The outputs that are memory, inputs, or tensors over these; the helper makes them."""
        self._others = {
            index: each
            for index, (each, piece) in enumerate(zip(outputs, pieces, strict=True))
            if piece is None and not isinstance(each, Fixed)
        }
        # The helper returns a tuple, and a callable that returns a list goes on to return one.
        self.are_plain = as_tuple and not self._others
        """Whether the helper makes all of them."""

    def gather(self, fill: Callable[..., tuple[Any, ...]], memory: list[Any], inputs: list[Any]) -> Any:
        """Return the outputs of a call in their order; `fill` is `TensorOps.filling(pieces)`."""
        found = list(fill(memory, inputs, self.blank))
        for index, each in self._others.items():
            found[index] = found[each.index] if isinstance(each, Same) else _made(each, memory, inputs)
        return tuple(found) if self._as_tuple else found


def _constant(outputs: Sequence[Output], output: Output) -> Fixed | None:
    """Return the constant that an output is again; None if it is none. As an output by itself it needs no Python at a call."""
    first = outputs[output.index] if isinstance(output, Same) else None
    return first if isinstance(first, Fixed) else None


def _piece(index: int, output: Output, dtypes: Sequence[torch.dtype]) -> Piece | None:
    """Return the tensor that the helper is to make for an output; None if it makes no such output."""
    if isinstance(output, Whole | Input):
        return Piece(index, output.memory if isinstance(output, Whole) else ~output.index)
    if isinstance(output, Part):
        base, keeps_dtype = output.memory, output.dtype == dtypes[output.memory]
    elif isinstance(output, View):
        base, keeps_dtype = ~output.index, output.keeps_dtype
    else:
        return None
    # None wherever it is possible: to see memory as another type costs a view at each call.
    dtype = None if keeps_dtype else output.dtype
    try:
        torch_private.dtype_code(dtype)
    except LookupError:  # libtorch's stable C interface does not know it
        return None
    return Piece(index, base, dtype, output.offset, output.size, output.stride)


def _made(output: Any, memory: Sequence[Any], inputs: Sequence[Any]) -> torch.Tensor:
    if isinstance(output, Empty):
        return torch.empty_strided(output.size, output.stride, dtype=output.dtype, device=output.device)
    if isinstance(output, Flagged):
        return torch_private.viewed_like(_made(output.of, memory, inputs), output.like)
    base = memory[output.memory] if isinstance(output, Part) else inputs[output.index]
    # `as_strided` would make a view for autograd, which a program could tell from a fresh tensor.
    return torch_private.reinterpret(base, output.dtype, output.size, output.stride, output.offset)


def first_positions(values: Sequence[Any], inputs: Sequence[Any] = ()) -> list[int]:
    """Return for each value the position of the first one that is the same tensor; its own where it is no tensor, or one of `inputs`."""
    given = {id(each) for each in inputs}
    first: dict[int, int] = {}
    return [
        first.setdefault(id(each), index)
        if isinstance(each, torch.Tensor) and id(each) not in given
        else index
        for index, each in enumerate(values)
    ]
