"""The interface of the compiled helper, which does the work of a replay in one call, and the same operations in Python.

A replay compares the addresses of its inputs, and makes tensors over memory. In Python that takes 0.1 us for each tensor compared, and
1 us for each tensor made, at every call.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.native import build

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence
    from pathlib import Path

    import torch


class Piece(NamedTuple):
    """A tensor to make over the memory of another one."""

    target: int
    """The index of the tensor in the list of made tensors."""
    base: int
    """The index of the allocation that the tensor lies in, or ~index of an input."""
    dtype: torch.dtype | None
    """The dtype of the tensor; None: that of the base."""
    offset: int
    """The offset from the beginning of the base, in elements of `dtype`."""
    size: tuple[int, ...]
    stride: tuple[int, ...]


Launch = Callable[[int, int], Any]
"""Launches an executable on a stream. A value that `TensorOps.launching` returned works in `Fused` alone."""


class Fused(Protocol):
    """A recording that the compiled helper serves, with counts of its calls. As a context manager, it holds off calls of other threads."""

    replays: int
    relocated: int
    written: int
    fused: int
    next_check: int
    used: int
    """The six counts of the calls; see `replay.Counts`."""
    table: Any
    """The executable table that `TensorOps.table` returned; None: the recording is closed, and serves no call."""
    launch: Launch
    expect: Callable[[int], None] | None
    """Called with the stream before a launch; raises `FallbackError` if the launch may not go to that stream now."""

    def __call__(self, inputs: list[Any], /) -> tuple[Any, Any] | None:
        """Serve a call, clear its inputs, and return the outputs and what `launch` has returned.

        Returns None if the recording cannot serve the call: nothing was launched then. Raises the errors of allocating, of making an
        executable, of writing nodes and of launching. In both cases the inputs are as they were.
        """

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...


class Parts(NamedTuple):
    """The arguments of `TensorOps.fused`: everything that is the same at each call of a recording."""

    allocate: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    """The arguments of `allocate` for each allocation."""
    targets: tuple[int, ...]
    """For each allocation, its index among the memories of the call."""
    pieces: Sequence[Piece]
    picks: Sequence[tuple[int, int]]
    """The source of each output; see `Outputs.picks`."""
    blank: list[Any]
    """The outputs that are the same at each call; see `Outputs.blank`."""
    stream: Callable[[], int]
    generators: tuple[tuple[int, Any], ...]
    """Random number generators among the inputs, as (index, object). Another object does not fit the recording."""
    table: Any
    launch: Launch
    expect: Callable[[int], None] | None


class TensorOps(Protocol):
    """Operations on many tensors at once."""

    def filling(self, pieces: Sequence[Piece]) -> Callable[[list[Any], list[Any], list[Any]], None]:
        """Return a function of (memories, inputs, made) that makes the pieces, and puts each into the list `made`."""

    def fused(self, parts: Parts) -> Fused | None:
        """Return a recording that serves calls by itself; None if Python has to take each step of a call."""

    def running(
        self,
        replays: dict[tuple[int, ...], Fused],
        integers: list[int],
        conditions: tuple[tuple[Callable[[], object], object], ...],
        owner: Any,
    ) -> Callable[[list[Any]], Any] | None:
        """Return a callable that serves each call by one of `replays`, found by the integer inputs; None if Python has to find it.

        It calls `owner(inputs)` where there is no replay, where the replay has reached `next_check`, or where a function in `conditions`
        does not return the value beside it. It calls `owner.run_by_steps(inputs)` if the replay cannot serve the call. It calls
        `owner.replay_failed(inputs, exception)` if the replay raised before its launch.
        """

    def tick(self) -> int:
        """Return the next number in the order of all calls."""

    def table(
        self,
        numbers: array[int],
        words: memoryview,
        executable: int,
        limits: tuple[int, int, int],
        make: Callable[[int], int | None],
        fail: Callable[[int, int], NoReturn],
    ) -> Any:
        """Return an executable table that holds `executable`; None: use the table in Python, `exec_cache.ExecutableTable`.

        `numbers` comes from `Segments.numbers`. `limits` are the maximum number of executables, `WORTH` and `IDLE_CALLS`. `make` makes
        another executable on a stream. `fail` is called with the error code of a write and the number of the node.
        """

    def bind(
        self, table: Any, inputs: list[Any], memory: list[Any], stream: int, /
    ) -> tuple[int, int] | None:
        """Return an executable bound to the addresses of a call, and the number of nodes written; None if the call does not fit."""

    def launching(self, function: int, fail: Callable[[int], NoReturn]) -> Launch | None:
        """Return a launch function for `Fused` that calls the driver's function at an address; None if Python has to call it.

        `fail` is called with the code that the driver returns, if that is not 0.
        """


class PythonOps:
    """`TensorOps` in Python, without the helper."""

    def filling(self, pieces: Sequence[Piece]) -> Callable[[list[Any], list[Any], list[Any]], None]:
        """See `TensorOps`."""
        same = [piece for piece in pieces if piece.dtype is None]
        same.sort(key=lambda piece: piece.base < 0)
        own, others = (
            [each.base for each in same if each.base >= 0],
            [~each.base for each in same if each.base < 0],
        )
        columns = [each.size for each in same], [each.stride for each in same], [each.offset for each in same]
        targets, reinterpreter = [each.target for each in same], torch_private.reinterpreter()
        viewed = [(piece, piece.dtype) for piece in pieces if piece.dtype is not None]

        def fill(memory: list[Any], inputs: list[Any], made: list[Any]) -> None:
            where = [*map(memory.__getitem__, own), *map(inputs.__getitem__, others)]
            for target, tensor in zip(targets, map(reinterpreter, where, *columns), strict=True):
                made[target] = tensor
            for each, dtype in viewed:
                base = memory[each.base] if each.base >= 0 else inputs[~each.base]
                made[each.target] = torch_private.reinterpret(
                    base, dtype, each.size, each.stride, each.offset
                )

        return fill

    def fused(self, parts: Parts) -> Fused | None:
        """See `TensorOps`."""
        del parts
        return None

    def running(self, *arguments: Any) -> None:
        """See `TensorOps`."""
        del arguments

    def tick(self) -> int:
        """See `TensorOps`."""
        return next(_ticks)

    def table(self, *arguments: Any) -> Any:
        """See `TensorOps`."""
        del arguments

    def bind(self, *arguments: Any) -> NoReturn:
        """See `TensorOps`; there are no tables to call it with."""
        raise NotImplementedError(arguments)

    def launching(self, function: int, fail: Callable[[int], NoReturn]) -> Launch | None:
        """See `TensorOps`."""
        del function, fail
        return None


_ticks = itertools.count(1)


class NativeOps:
    """The compiled helper, a module made of `helper.c`."""

    def __init__(self, module: Any) -> None:
        self.bind, self.tick = module.bind, module.tick
        self._module = module

    def filling(self, pieces: Sequence[Piece]) -> Callable[[list[Any], list[Any], list[Any]], None]:
        """See `TensorOps`."""
        plan = self._plan(pieces)
        return PythonOps().filling(pieces) if plan is None else functools.partial(self._module.fill, plan)

    def _plan(self, pieces: Sequence[Piece]) -> Any:
        """Return the plan of the helper for these pieces; None if it cannot make one of them."""
        try:
            told = [piece._replace(dtype=torch_private.dtype_code(piece.dtype)) for piece in pieces]
        except LookupError:
            return None
        # Those of one type over one memory in a row: that is then seen as of this type once.
        told.sort(key=lambda piece: (piece.base, piece.dtype))
        return self._module.plan([tuple(piece) for piece in told])

    def fused(self, parts: Parts) -> Fused | None:
        """See `TensorOps`."""
        module, plan = self._module, self._plan(parts.pieces)
        if plan is None:
            return None
        made: Fused = module.FusedReplay(*parts._replace(pieces=plan, picks=module.picks([*parts.picks])))
        return made

    def running(
        self,
        replays: dict[tuple[int, ...], Fused],
        integers: list[int],
        conditions: tuple[tuple[Callable[[], object], object], ...],
        owner: Any,
    ) -> Callable[[list[Any]], Any] | None:
        """See `TensorOps`."""
        return functools.partial(self._module.run, replays, integers, conditions, owner)

    def table(
        self,
        numbers: array[int],
        words: memoryview,
        executable: int,
        limits: tuple[int, int, int],
        make: Callable[[int], int | None],
        fail: Callable[[int, int], NoReturn],
    ) -> Any:
        """See `TensorOps`."""
        return self._module.table(numbers, words, executable, *limits, make, fail)

    def launching(self, function: int, fail: Callable[[int], NoReturn]) -> Launch | None:
        """See `TensorOps`."""
        made: Launch = self._module.launcher(function, fail)
        return made


def _configure(module: Any) -> str | None:
    try:
        return torch_private.configure_helper(module)
    except Exception as error:  # noqa: BLE001 - tensors may be anything within modes of the user's
        return f"it cannot be tried: {error}"


COMPILING_S = 10.0
"""Seconds for which trials are put off until the compiler has finished; it takes 0.4 s on one core."""


class Helper:
    """The compiled helper of a process."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._ops: TensorOps | None = None
        self._waited_for_until = 0.0

    def prepare(self, cache: Path, *, may_compile: bool = True) -> str | None:
        """Start to compile it unless that was done before, or may not be done; return why it will not be loaded, or None."""
        if self._path is not None or self._ops is not None:
            return None
        try:
            if reason := torch_private.missing_for_helper():
                return reason
            path = build.place(cache)
            reason = build.compile_once(path) if may_compile else build.why_not_there(path)
        except Exception as error:  # noqa: BLE001 - it is optional, and must not be in the way of anything
            return f"it cannot be compiled: {error}"
        if reason is None:
            self._path = path
            self._waited_for_until = time.monotonic() + COMPILING_S
        return reason

    def is_coming(self) -> bool:
        """Return whether it is being compiled: a recording made now would do without it until the process ends."""
        path = self._path
        return path is not None and time.monotonic() < self._waited_for_until and build.may_come(path)

    def ops(self, note: Callable[[str], None]) -> TensorOps:
        """Return the helper if it is loaded by now, else the same in Python; `note` is called with the reason if it cannot be used."""
        path = self._path
        if self._ops is None and path is not None:
            self._load(path, note)
        return self._ops or PythonOps()

    def _load(self, path: Path, note: Callable[[str], None]) -> None:
        module: Any = build.load(path)
        if module is None:
            return  # it is being compiled
        self._path = None
        reason = module if isinstance(module, str) else _configure(module)
        if reason is None:
            self._ops = NativeOps(module)
        else:
            note(f"compiled helper: {reason}")

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is compiled, for a benchmark or a test; return whether it is."""
        end = time.monotonic() + timeout_s
        while self._path is not None and not self._path.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return self._ops is not None or (self._path is not None and self._path.exists())

    def forget(self) -> None:
        """Reset to the state at the start of a process."""
        self._path = self._ops = None


helper = Helper()
