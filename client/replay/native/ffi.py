"""Interface of the compiled helper, which does the work of a replay for hundreds of tensors in one call, and the same in Python.

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
    """Its index in the list of made tensors."""
    base: int
    """The index of the allocation that it lies in, or ~index of an input."""
    dtype: torch.dtype | None
    """None: that of the base."""
    offset: int
    """From the begin of the base, in elements of its own dtype."""
    size: tuple[int, ...]
    stride: tuple[int, ...]


Launch = Callable[[int, int], Any]
"""Launches an executable on a stream. What `TensorOps.launching` returns is one for `Fused` alone."""


class Fused(Protocol):
    """A recording that the compiled helper serves by itself, with counts of its calls. As a context, it keeps other threads from calling it."""

    replays: int
    relocated: int
    written: int
    fused: int
    look_at: int
    used: int
    """See `replay.Counts`."""
    table: Any
    """Of `TensorOps.table`; None: the recording is closed, and serves no call."""
    launch: Launch
    expect: Callable[[int], None] | None
    """Raises before a launch that may not be on a stream now."""

    def __call__(self, inputs: list[Any], /) -> tuple[Any, Any] | None:
        """Serve a call, clear its inputs, and return the outputs and what `launch` has returned.

        None, with nothing launched and the inputs as they were, if the recording cannot serve it. Raises what allocating, making an
        executable, writing nodes and launching do, with the inputs as they were.
        """

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...


class Parts(NamedTuple):
    """What is the same at each call that the compiled helper serves."""

    allocate: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    """Of each allocation."""
    targets: tuple[int, ...]
    """Of each allocation, its index among the call's memories."""
    pieces: Sequence[Piece]
    picks: Sequence[tuple[int, int]]
    """See `Outputs.picks`."""
    blank: list[Any]
    """See `Outputs.blank`."""
    stream: Callable[[], int]
    generators: tuple[tuple[int, Any], ...]
    """Inputs that have to be these objects, as (index, object)."""
    table: Any
    launch: Launch
    expect: Callable[[int], None] | None


class TensorOps(Protocol):
    """Work on many tensors at once."""

    def filling(self, pieces: Sequence[Piece]) -> Callable[[list[Any], list[Any], list[Any]], None]:
        """Return a function of (memories, inputs, made) that makes the pieces, and puts each into the list `made`."""

    def fused(self, parts: Parts) -> Fused | None:
        """Return what serves calls by itself; None if each step of a call has to be taken in Python."""

    def running(
        self,
        replays: dict[tuple[int, ...], Fused],
        integers: list[int],
        conditions: tuple[tuple[Callable[[], object], object], ...],
        owner: Any,
    ) -> Callable[[list[Any]], Any] | None:
        """Return what serves a call by one of `replays`, found by the integers among the inputs; None if Python has to find it.

        Each of `conditions`, as (function, value), must return that value; otherwise, and where there is no replay or it is due to be
        looked at, it calls `owner`. If the replay cannot serve the call it calls `owner.run_by_steps(inputs)`, and if one has raised
        before it was launched, `owner.replay_failed(inputs, exception)`.
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
        """Return a table of executables that begins with one; None if it has to be Python's, `exec_cache.ExecutableTable`.

        `numbers` are those of `Segments.numbers`, and `limits` how many executables there may be, `WORTH` and `IDLE_CALLS`. `make` makes
        another one on a stream; `fail` is told what writing a node has returned, and which node.
        """

    def bind(
        self, table: Any, inputs: list[Any], memory: list[Any], stream: int, /
    ) -> tuple[int, int] | None:
        """Return an executable that is bound where a call lies, and how many nodes were written; None if it does not fit."""

    def launching(self, function: int, fail: Callable[[int], NoReturn]) -> Launch | None:
        """Return what launches by the driver's function at an address, for a `Fused` alone; `fail` is told what that returns but 0.

        None, if Python has to call it.
        """


class PythonOps:
    """The same without the helper."""

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
        """Return what the module is to make; None if it cannot make one of them."""
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
"""A compiler that takes longer is not waited for (0.4 s on one core)."""


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
        """Whether it is being compiled: a recording made now would do without it until the process ends."""
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
