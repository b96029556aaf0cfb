"""The interface of the compiled helper, which does the work of a replay in one call.

A replay compares the addresses of its inputs, and makes tensors over memory. In Python that takes 0.1 us for each tensor compared, and
1 us for each tensor made, at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pygraphd.client.backend import torch_private
from pygraphd.client.common.signals import raised_by_handler
from pygraphd.client.replay.native import build

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class Piece(NamedTuple):
    """A tensor to make over the memory of another one, or that tensor itself."""

    target: int
    """The index of the tensor in the list of outputs."""
    base: int
    """The index of the allocation that the tensor lies in, or ~index of an input."""
    dtype: torch.dtype | None = None
    """The dtype of the tensor; None: that of the base."""
    offset: int | None = None
    """The offset from the beginning of the base, in elements of `dtype`; None: the base itself."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    is_output: bool = False
    """Whether it is another output, the same object: `base` is the index of that output, which is a piece, too."""


_ITSELF, _OUTPUT = -2, -3
"""The codes of dtypes that stand for the base itself and for another output, as in `helper.c`."""

Launch = Callable[[int, int], Any]
"""Launches an executable on a stream."""


class Fused(Protocol):
    """A recording of the compiled helper, with counts of its calls. As a context manager, it holds off calls of other threads."""

    replays: int
    relocated: int
    """Replays for which a node was written."""
    written: int
    """Nodes written into an executable."""
    fused: int
    """Replays that the compiled helper served by itself."""
    next_check: int
    """The value of `replays` from which on `Recordings` serves the call itself, to check results (`result_check.py`)."""
    used: int
    """The number of the latest call, counted over all recordings; see `TensorOps.tick`."""
    table: Any
    """The executable table that `TensorOps.table` returned; None: the recording is closed, and serves no call."""
    launch: Launch | int
    expect: Callable[[int], None] | None
    """Called with the stream before a launch; raises `FallbackError` if the launch may not go to that stream now."""
    arguments: tuple[tuple[Any, ...], ...]
    """See `Parts.arguments`; to be replaced by as many tuples, between `__enter__` and `__exit__`."""

    def __call__(self, inputs: list[Any], /) -> tuple[Any, Any] | None:
        """Serve a call, clear its inputs, and return the outputs and what `launch` has returned.

        Returns None if the recording cannot serve the call: nothing was launched then. Raises the errors of allocating, of making an
        executable, of writing nodes and of launching. In both cases the inputs are as they were.
        """

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...

    def is_held_here(self) -> bool:
        """Return whether this thread is in a call of it, or between `__enter__` and `__exit__`: entering again would raise."""


class Parts(NamedTuple):
    """The arguments of `TensorOps.fused`: everything that is the same at each call of a recording."""

    allocate: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    """The arguments of `allocate` for each allocation."""
    targets: tuple[int, ...]
    """For each allocation, its index among the memories of the call."""
    pieces: Sequence[Piece]
    blank: list[Any]
    """The outputs that are the same at each call; see `Outputs.blank`."""
    current_stream: int
    """The address of libtorch's function; see `torch_private.stream_function`. 0: the default stream is always the current one."""
    device_index: int
    is_capturing: int
    """The address of the driver's function, an int (*)(stream, status)."""
    generators: tuple[tuple[int, Any], ...]
    """Random number generators among the inputs, as (index, object). Another object does not fit the recording."""
    table: Any
    launch: Launch | int
    fail: Callable[[int], None]
    """Called with the code that the driver's function has returned, unless that is 0; raises."""
    expect: Callable[[int], None] | None


def _coded(piece: Piece) -> tuple[Any, ...]:
    if piece.offset is not None:
        dtype, offset = torch_private.dtype_code(piece.dtype), piece.offset
    else:
        dtype, offset = _OUTPUT if piece.is_output else _ITSELF, 0
    return piece.target, piece.base, dtype, offset, piece.size, piece.stride


class TensorOps:
    """The functions of the compiled helper, a module made of `helper.c`, which describes those that have no text here."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # The module's own functions: a method around one would add a Python frame to each call.
        self.tick: Callable[[], int] = module.tick
        self.bind: Callable[[Any, list[Any], list[Any], int], tuple[int, int] | None] = module.bind
        """bind(table, inputs, memories, stream) returns an executable for their addresses, and how many nodes were written for it.

        Returns None if the call does not fit; raises DriverError. Launches that still run are not affected by writes.
        """
        self.run: Callable[..., Any] = module.run
        """Serves a call: run(replays, integers, conditions, tangents, owner, inputs). The inputs at `integers` find the recording among `replays`.

        It calls `owner(inputs)` where there is no replay, where the replay has reached `next_check`, while a profiler runs, where the current stream is being
        captured, where a function in `conditions` does not return the value beside it, or where an input at `tangents` is a conjugate or negative
        view. It calls `owner.run_in_python(inputs)` if the replay cannot serve the call. It calls
        `owner.replay_failed(inputs, exception)` if the replay raised before its launch.
        """
        self.kernel_functions: Callable[[], tuple[int, int]] = module.kernel_functions
        self.arena_range: Callable[[int, int], int] = module.arena_range
        self.arena_functions: Callable[[], tuple[int, int]] = module.arena_functions
        self.table: Callable[..., Any] = module.table
        self.keep_from_profiles: Callable[[Any], None] = module.keep_from_profiles

    def filling(
        self, pieces: Sequence[Piece]
    ) -> Callable[[list[Any], list[Any], list[Any]], tuple[Any, ...]]:
        """Return a function of (memories, inputs, blank) that makes the pieces, and returns the list `blank` as a tuple with these in it.

        Raises LookupError if the helper cannot make a tensor of one of the dtypes.
        """
        return functools.partial(self._module.fill, self._plan(pieces))

    def _plan(self, pieces: Sequence[Piece]) -> Any:
        # Outputs that are other outputs come after these. The others of one type over one memory come in a row: that is then seen
        # as of this type once.
        in_order = sorted(map(_coded, pieces), key=lambda coded: (coded[2] == _OUTPUT, coded[1], coded[2]))
        return self._module.plan(in_order)

    def fused(self, parts: Parts) -> Fused:
        """Return a recording that serves calls by itself; raises LookupError as `filling` does."""
        made: Fused = self._module.FusedReplay(*parts._replace(pieces=self._plan(parts.pieces)))
        return made


class Helper:
    """The compiled helper of a process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset to the state at the start of a process."""
        self._ops: TensorOps | None = None
        self._reason: str | None = None

    @property
    def ops(self) -> TensorOps:
        """The functions of the helper, which has to be prepared before."""
        assert self._ops is not None, self._reason
        return self._ops

    def prepare(self, cache: Path, *, may_compile: bool = True) -> str | None:
        """Have it in this process, compiled into a cache folder if need be; return why it cannot be had. Later calls return the same."""
        if self._ops is None and self._reason is None:
            try:
                self._reason = self._load(cache, may_compile=may_compile)
            except Exception as error:  # where it cannot be had, programs run as without PyGraph
                if raised_by_handler(error):
                    raise  # the program's own
                self._reason = f"it cannot be compiled or tried: {error}"
        return self._reason if self._ops is None else None

    def _load(self, cache: Path, *, may_compile: bool) -> str | None:
        path = build.place(cache)
        reason = torch_private.missing_for_helper() or build.compile_once(path, may_compile=may_compile)
        module: Any = reason or build.load(path)
        if isinstance(module, str):
            return module
        # Another thread may have it by now, whose replays a second one would not know.
        if (reason := torch_private.configure_helper(module)) is None and self._ops is None:
            self._ops = TensorOps(module)
        return reason


helper = Helper()
