"""How the outputs of a call are made: which of its allocations and inputs they are, or what is made of these anew."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch

from pygraphd.client import _torch
from pygraphd.client.bulk import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pygraphd.client.bulk import Bulk


class Output(Protocol):
    """How one output of a call is made."""

    def make(self, inputs: Sequence[Any], memory: Sequence[Any]) -> Any:
        """Return the output; `memory` holds what the call has allocated."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same object at every call: None, a number, a constant of the module."""

    value: Any

    def make(self, _inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Empty:
    """A tensor without elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, _inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return a new one."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Input:
    """One of the inputs itself."""

    index: int

    def make(self, inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return it."""
        return inputs[self.index]


@dataclass(frozen=True, slots=True)
class View:
    """A view of an input; `offset` in elements of `dtype`, from where the input begins."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    keeps_dtype: bool = False
    """Whether the input is of this type, too."""

    def make(self, inputs: Sequence[Any], _memory: Sequence[Any]) -> Any:
        """Return a tensor over the input's storage."""
        return _torch.reinterpret(inputs[self.index], self.dtype, self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Whole:
    """All of a slot's memory."""

    memory: int

    def make(self, _inputs: Sequence[Any], memory: Sequence[Any]) -> Any:
        """Return it."""
        return memory[self.memory]


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a slot's memory; `offset` in elements of `dtype`."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def make(self, _inputs: Sequence[Any], memory: Sequence[Any]) -> Any:
        """Return a tensor over the memory's storage."""
        return _torch.reinterpret(memory[self.memory], self.dtype, self.size, self.stride, self.offset)


class Outputs:
    """All outputs of a recording. What is an allocation or an input itself is picked by index, the rest, `made`, is made."""

    def __init__(self, outputs: Sequence[Output], dtypes: Sequence[torch.dtype], *, as_tuple: bool) -> None:
        """Describe the outputs of calls whose allocations are of these types."""
        self.all = tuple(outputs)
        self.made = tuple(each for each in outputs if not isinstance(each, Whole | Input))
        self._dtypes = tuple(dtypes)
        indices, first_input = [], len(dtypes) + len(self.made)
        unmade = iter(range(len(dtypes), first_input))
        for each in outputs:
            if isinstance(each, Whole):
                indices.append(each.memory)
            elif isinstance(each, Input):
                indices.append(first_input + each.index)
            else:
                indices.append(next(unmade))
        self._pick = _picker(indices)
        self._as_tuple = as_tuple
        self._blank = [each.value if isinstance(each, Fixed) else None for each in self.made]

    def blank(self) -> list[Any]:
        """Return a list for `made`, with what is the same at every call in its place."""
        return self._blank.copy()

    def making(self, which: Iterable[int], bulk: Bulk) -> Making:
        """Return what makes some of `made`, by index."""
        return Making(self.made, which, self._dtypes, bulk)

    def gather(self, memory: Sequence[Any], made: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Return the outputs in their order."""
        outputs = self._pick([*memory, *made, *inputs])
        return outputs if self._as_tuple else list(outputs)

    def memory_of(self, index: int) -> int | None:
        """Return which allocation an output lies in, if it lies in one."""
        output = self.all[index]
        return output.memory if isinstance(output, Whole | Part) else None


class Making:
    """Makes some outputs at each call: tensors over memory of their own type in one go, which are by far the most."""

    def __init__(
        self, made: Sequence[Output], which: Iterable[int], dtypes: Sequence[torch.dtype], bulk: Bulk
    ) -> None:
        self._made = made
        pieces: list[Piece] = []
        self._others: list[int] = []
        for index in which:
            each = made[index]
            if _is_plain_part(each, dtypes):
                pieces.append(Piece(index, each.memory, each.offset, each.size, each.stride))
            elif _is_plain_view(each):
                pieces.append(Piece(index, ~each.index, each.offset, each.size, each.stride))
            elif not isinstance(each, Fixed):
                self._others.append(index)
        self._fill = bulk.filling(pieces) if pieces else None

    def fill(self, made: list[Any], inputs: list[Any], memory: list[Any]) -> list[Any]:
        """Put what was made into `made`, from `Outputs.blank`, at its indices; returns it."""
        if self._fill is not None:
            self._fill(memory, inputs, made)
        for index in self._others:
            made[index] = self._made[index].make(inputs, memory)
        return made


def _is_plain_part(output: Output, dtypes: Sequence[torch.dtype]) -> TypeGuard[Part]:
    return isinstance(output, Part) and output.dtype == dtypes[output.memory]


def _is_plain_view(output: Output) -> TypeGuard[View]:
    return isinstance(output, View) and output.keeps_dtype


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    if indices:
        (only,) = indices
        return lambda pool: (pool[only],)
    return lambda pool: ()
