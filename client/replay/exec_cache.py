"""The executables of one recording, and the table that finds one for the addresses of a call.

A call needs no write if an executable is bound to its addresses. Other addresses are written to the first executable, at 0.5 to 0.7 us
of host time a node. Addresses that come again get an executable of their own if that saves enough. So sets that alternate, like the
weights of layers that share a graph, are soon written no more. An executable costs some hundred us once, and about 3 KB of GPU memory a node.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import FallbackError
from pygraphd.client.common.bounded_lru import BoundedLRU

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.replay.graph_exec import Segments
    from pygraphd.client.replay.native.ffi import TensorOps
    from pygraphd.client.replay.node_params import Parameters

FEW_EXECUTABLES = 4
"""Maximum number of executables of a large graph."""
MAX_EXECUTABLES = 64
"""Maximum number of executables of a small graph: the layers of a model may share one graph."""
MAX_NODES = 1_024
"""Maximum number of nodes in all executables of a graph that has more than `FEW_EXECUTABLES`."""
WORTH = 4
"""Minimum number of nodes to write for which another executable is made: writing them takes about as long as a launch."""
IDLE_CALLS = 256
"""Number of calls without use after which an executable may be bound to other addresses."""
MOST_SEEN = 256
"""Number of sets of addresses, the latest, that are remembered as written once."""

ONE_LESS = "addresses take turns and share an executable"


def most_executables(nodes: int) -> int:
    """Return the maximum number of executables of a graph with this number of nodes."""
    return max(FEW_EXECUTABLES, min(MAX_EXECUTABLES, MAX_NODES // max(nodes, 1)))


class Instances:
    """Makes the executables of a graph, and destroys them."""

    def __init__(
        self, driver: Driver, graph: int, parameters: Parameters, stream: int, note: Callable[[str], None]
    ) -> None:
        """Make the first executable; `note` is told the reason when another one cannot be made. Raises DriverError."""
        self._driver = driver
        self._graph = graph
        self._parameters = parameters
        self._note = note
        self.handles = [driver.instantiate(graph, stream)]

    def make(self, stream: int) -> int | None:
        """Return another executable, bound to the addresses in the node parameters; None if it cannot be made.

        The graph is written first: the addresses at which it was recorded may be unmapped by now, and the driver checks those of copies
        and memsets when it instantiates.
        """
        try:
            with self._driver.relaxed():
                self._parameters.write_graph()
                self.handles.append(self._driver.instantiate(self._graph, stream))
        except DriverError as error:
            self._note(f"{ONE_LESS}: {error}")
            return None
        return self.handles[-1]

    def close(self) -> None:
        """Destroy all executables; launches that still run go on."""
        while self.handles:
            with contextlib.suppress(DriverError):
                self._driver.destroy_executable(self.handles.pop())


@dataclass(slots=True, eq=False)
class _Executable:
    handle: int
    at: list[int] | None
    """The addresses that it is bound to; None: unknown, since an exception interrupted a write."""
    used: int = 0
    """The number of the latest call that it served."""
    next: _Executable | None = None
    """The executable that was used after it the last time: where addresses rotate, so do executables."""


class ExecutableTable:
    """The executable table in Python; `exec_table.h` is the same in C, and differs in nothing but time."""

    def __init__(self, segments: Segments, parameters: Parameters, instances: Instances, limit: int) -> None:
        self._segments = segments
        self._parameters = parameters
        self._instances = instances
        self._limit = limit
        self._all = [_Executable(instances.handles[0], segments.bound)]
        self._latest = self._all[0]
        self._calls = 0
        self._seen = BoundedLRU[tuple[int, ...], None](MOST_SEEN)
        self._words_at: list[int] | None = segments.bound
        """The addresses in the node parameters; None: unknown, since an exception interrupted a change."""

    def bind(self, inputs: list[Any], memory: list[Any], stream: int) -> tuple[int, int]:
        """Return an executable that is bound to the addresses of a call, and the number of nodes that were written for it.

        An executable may be written while a launch of it runs, which is not affected. Raises `FallbackError`, or `DriverError`.
        """
        now = self._segments.addresses(inputs, memory)
        self._calls += 1
        latest = self._latest
        expected = latest.next or latest
        found, written = (expected if expected.at == now else self._find(now)), 0
        if found is None:
            found, written = self._rebound(now, stream)
        self._latest = latest.next = found
        found.used = self._calls
        return found.handle, written

    def _find(self, now: list[int]) -> _Executable | None:
        return next((each for each in self._all if each.at == now), None)

    def _rebound(self, now: list[int], stream: int) -> tuple[_Executable, int]:
        """Bind an executable to these addresses; return it, and the number of nodes that were written, or would have been."""
        to = self._all[0]
        nodes = self._to_be_written(to, now)
        if self._was_seen(now) and len(nodes) >= WORTH:
            if len(self._all) < self._limit and (another := self._another(now, stream)) is not None:
                return another, len(nodes)
            to = self._idle_or_first()
            nodes = self._to_be_written(to, now)
        to.at = None
        self._follow(now)
        self._parameters.write(to.handle, sorted(nodes))
        to.at = now
        return to, len(nodes)

    def _to_be_written(self, executable: _Executable, now: list[int]) -> set[int]:
        nodes: set[int] = set()
        for segment, _ in self._segments.moved(executable.at, now):
            nodes.update(segment.nodes)
        return nodes

    def _was_seen(self, now: list[int]) -> bool:
        """Return whether these addresses are remembered, and remember them."""
        if (key := tuple(now)) in self._seen:
            return True
        self._seen[key] = None
        return False

    def _another(self, now: list[int], stream: int) -> _Executable | None:
        self._follow(now)
        handle = self._instances.make(stream)
        if handle is None:
            self._limit = len(self._all)  # those that there are go on
            return None
        self._all.append(_Executable(handle, now))
        return self._all[-1]

    def _idle_or_first(self) -> _Executable:
        """Return the least recently used executable if its last use is long ago, else the first.

        With more sets in rotation than executables, plain replacement would evict each set just before it comes again.
        """
        oldest = min(self._all[1:], key=lambda each: each.used, default=self._all[0])
        return oldest if self._calls - oldest.used > IDLE_CALLS else self._all[0]

    def _follow(self, now: list[int]) -> None:
        """Write the addresses of the call into the node parameters."""
        at, self._words_at = self._words_at, None
        words = self._parameters.words
        for segment, base in self._segments.moved(at, now):
            for index, offset in segment.words:
                words[index] = base + offset
        self._words_at = now


class Executables:
    """The executables of one graph and their table, which is the compiled helper's if that is loaded."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        parameters: Parameters,
        segments: Segments,
        ops: TensorOps,
        stream: int,
        note: Callable[[str], None],
    ) -> None:
        """Make the first executable; for `note` see `Instances`. Raises DriverError."""
        self._segments = segments
        self._instances = instances = Instances(driver, graph, parameters, stream, note)
        limit = most_executables(len(parameters))
        self._table: ExecutableTable | None = None
        self.native: Any = None
        """The table of the compiled helper; None: the table is in Python."""
        try:
            self.native = ops.table(
                segments.numbers(parameters.writes_by_address()),
                parameters.words,
                instances.handles[0],
                (limit, WORTH, IDLE_CALLS),
                instances.make,
                parameters.fail_to_write,
            )
            if self.native is None:
                self._table = ExecutableTable(segments, parameters, instances, limit)
        except BaseException:
            instances.close()
            raise
        self._ops = ops

    def __len__(self) -> int:
        """Return the number of executables."""
        return len(self._instances.handles)

    def bind(self, inputs: list[Any], memory: list[Any], stream: int) -> tuple[int, int]:
        """See `ExecutableTable.bind`."""
        if self._table is not None:
            return self._table.bind(inputs, memory, stream)
        found = self._ops.bind(self.native, inputs, memory, stream)
        if found is None:
            self._raise_mismatch(self._segments.addresses(inputs, memory))
        return found

    def _raise_mismatch(self, now: Sequence[int]) -> NoReturn:
        for _ in self._segments.moved(None, now):
            pass
        raise FallbackError("the compiled helper does not find where its inputs lie")

    def close(self) -> None:
        """Destroy all executables."""
        self._table = self.native = None
        self._instances.close()
