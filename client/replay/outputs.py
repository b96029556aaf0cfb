"""Makes the outputs of a call: each is an allocation, an input, or a new tensor over the memory of one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.native.ffi import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.replay.native.ffi import TensorOps


class Output(Protocol):
    """Describes how one output is made at each call."""

    def make(self, inputs: Sequence[Any], memory: Sequence[Any]) -> Any:
        """Return the output; `memory` holds the allocations of the call."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """An output that is the same object at every call: None, a number, or a constant of the module."""

    value: Any

    def make(self, _inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Empty:
    """An output without elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, _inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return a new one."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Input:
    """An output that is one of the inputs."""

    index: int

    def make(self, inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return it."""
        return inputs[self.index]


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

    def make(self, inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return a tensor over the input's storage."""
        return torch_private.reinterpret(inputs[self.index], self.dtype, self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Whole:
    """An output that is a whole allocation of the call."""

    memory: int

    def make(self, _inputs: Sequence[Any], memory: Sequence[Any]) -> Any:
        """Return it."""
        return memory[self.memory]


@dataclass(frozen=True, slots=True)
class Part:
    """An output that lies in an allocation of the call; `offset` in elements of `dtype`."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def make(self, _inputs: Sequence[Any], memory: Sequence[Any]) -> Any:
        """Return a tensor over the memory's storage."""
        return torch_private.reinterpret(memory[self.memory], self.dtype, self.size, self.stride, self.offset)


class Outputs:
    """All outputs of a recording. Allocations and inputs are returned as they are; the other outputs, `made`, are made at each call."""

    def __init__(self, outputs: Sequence[Output], dtypes: Sequence[torch.dtype], *, as_tuple: bool) -> None:
        """Describe the outputs of calls; `dtypes` are those of the allocations."""
        self.all = tuple(outputs)
        self.made = tuple(each for each in outputs if not isinstance(each, Whole | Input))
        self._dtypes = tuple(dtypes)
        unmade = iter(range(len(self.made)))
        self._picks = [
            (0, each.memory) if isinstance(each, Whole)
            else (2, each.index) if isinstance(each, Input)
            else (1, next(unmade))
            for each in outputs
        ]  # fmt: skip
        self._as_tuple = as_tuple
        self._blank = [each.value if isinstance(each, Fixed) else None for each in self.made]

    def blank(self) -> list[Any]:
        """Return a list for `made` that holds the outputs that are the same at each call, and None for the others."""
        return self._blank.copy()

    def making(self, ops: TensorOps) -> Making:
        """Return the maker of `made`."""
        return Making(self.made, self._dtypes, ops)

    @property
    def picks(self) -> Sequence[tuple[int, int]] | None:
        """The source of each output, as (0: memories, 1: `made`, 2: inputs; index); None if the callable returns no tuple."""
        return self._picks if self._as_tuple else None

    def gather(self, *lists: list[Any]) -> Any:
        """Return the outputs of a call in their order, from three lists: memories, `made` and inputs."""
        found = [lists[which][index] for which, index in self._picks]
        return tuple(found) if self._as_tuple else found

    def memory_of(self, index: int) -> int | None:
        """Return the index of the allocation that an output lies in; None if it lies in none."""
        output = self.all[index]
        return output.memory if isinstance(output, Whole | Part) else None


class Making:
    """Makes the outputs `Outputs.made` at each call. Nearly all are tensors over memory, which one call of `TensorOps` makes."""

    def __init__(self, made: Sequence[Output], dtypes: Sequence[torch.dtype], ops: TensorOps) -> None:
        self._made = made
        self._pieces = pieces = list[Piece]()
        self._others: list[int] = []
        for index, each in enumerate(made):
            if isinstance(each, Part):
                dtype = None if each.dtype == dtypes[each.memory] else each.dtype
                pieces.append(Piece(index, each.memory, dtype, each.offset, each.size, each.stride))
            elif isinstance(each, View):
                dtype = None if each.keeps_dtype else each.dtype
                pieces.append(Piece(index, ~each.index, dtype, each.offset, each.size, each.stride))
            elif not isinstance(each, Fixed):
                self._others.append(index)
        self._fill = ops.filling(pieces) if pieces else None

    @property
    def pieces(self) -> Sequence[Piece] | None:
        """The tensors to make over memory and inputs; None if there are outputs of another kind."""
        return None if self._others else self._pieces

    def fill(self, made: list[Any], inputs: list[Any], memory: list[Any]) -> list[Any]:
        """Make the outputs of one call, put them into `made`, a copy of `Outputs.blank`, and return that."""
        if self._fill is not None:
            self._fill(memory, inputs, made)
        for index in self._others:
            made[index] = self._made[index].make(inputs, memory)
        return made
