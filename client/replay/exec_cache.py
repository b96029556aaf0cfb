"""The executables of one graph, and which of them serves a call: one table from sets of addresses to executables.

A call whose addresses an executable is bound to needs no write. Others are written to the first executable, at 0.5 to 0.7 us of the
host's time a node. Addresses that come again get an executable of their own if that saves enough: sets that take turns, as the weights
of layers that share a graph, are then written no more. Another one costs some hundred us once, and about 3 KB of the GPU's memory a node.
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
    from pygraphd.client.replay.graph_exec import Slots
    from pygraphd.client.replay.native.ffi import Bulk
    from pygraphd.client.replay.node_params import Parameters

FEW_EXECUTABLES = 4
"""Executables that a graph of any size may have."""
MAX_EXECUTABLES = 64
"""Executables that a small graph may have: the layers of a model may share one graph."""
MAX_NODES = 1_024
"""Nodes of all executables of a graph that has more than a few."""
WORTH = 4
"""Nodes to be written from which on an executable is worth it, about as long as a launch takes."""
IDLE_CALLS = 256
"""Calls for which an executable was not used, after which other addresses may have it."""
MOST_SEEN = 256
"""Sets of addresses that are remembered as having been written once, the latest ones."""

ONE_LESS = "addresses take turns and share an executable"


def most_executables(nodes: int) -> int:
    """Return how many executables there may be of a graph with so many nodes."""
    return max(FEW_EXECUTABLES, min(MAX_EXECUTABLES, MAX_NODES // max(nodes, 1)))


class Instances:
    """Makes the executables of a graph, and destroys them."""

    def __init__(
        self, driver: Driver, graph: int, parameters: Parameters, stream: int, note: Callable[[str], None]
    ) -> None:
        """Make the first one; `note` is told why there is not another one where there should be. Raises DriverError."""
        self._driver = driver
        self._graph = graph
        self._parameters = parameters
        self._note = note
        self.handles = [driver.instantiate(graph, stream)]

    def make(self, stream: int) -> int | None:
        """Return another one that is bound where the words say; None if it cannot be had.

        Where the graph was recorded may be nobody's memory by now, and the driver looks at that of copies and memsets when it instantiates.
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
        """Destroy all; launches that still run go on."""
        while self.handles:
            with contextlib.suppress(DriverError):
                self._driver.destroy_executable(self.handles.pop())


@dataclass(slots=True, eq=False)
class _Executable:
    handle: int
    at: list[int] | None
    """The addresses that it is bound to; None: nobody knows, as something came in between while it was written to."""
    used: int = 0
    """The latest call that it served."""
    next: _Executable | None = None
    """The one that was used after it the last time, if any: where addresses rotate, so do executables."""


class Table:
    """Does in Python what `exec_table.h` does, which differs in nothing but time."""

    def __init__(self, slots: Slots, parameters: Parameters, instances: Instances, limit: int) -> None:
        self._slots = slots
        self._parameters = parameters
        self._instances = instances
        self._limit = limit
        self._all = [_Executable(instances.handles[0], slots.bound)]
        self._latest = self._all[0]
        self._calls = 0
        self._seen = BoundedLRU[tuple[int, ...], None](MOST_SEEN)
        self._words_at: list[int] | None = slots.bound
        """Where the words say that all lies; None: nobody knows."""

    def bind(self, inputs: list[Any], memory: list[Any], stream: int) -> tuple[int, int]:
        """Return an executable that is bound where a call lies, and how many nodes were written for that.

        An executable may still run while it is written to: what was launched before goes on as it was. Raises `FallbackError`, or `DriverError`.
        """
        now = self._slots.places(inputs, memory)
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
        """Return an executable that has come to be bound there, and how many nodes that took, or would have taken without another one."""
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
        for slot, _ in self._slots.elsewhere(executable.at, now):
            nodes.update(slot.nodes)
        return nodes

    def _was_seen(self, now: list[int]) -> bool:
        """Whether these addresses are among the last that this was asked of."""
        if (mark := tuple(now)) in self._seen:
            return True
        self._seen[mark] = None
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
        """Return the one that was not used for longest if that is long ago, or else the first.

        Of more sets in rotation than there are executables all but a few would otherwise be written, as the next one to come had just gone.
        """
        oldest = min(self._all[1:], key=lambda each: each.used, default=self._all[0])
        return oldest if self._calls - oldest.used > IDLE_CALLS else self._all[0]

    def _follow(self, now: list[int]) -> None:
        """Have the words say where the members of the call lie."""
        at, self._words_at = self._words_at, None
        words = self._parameters.words
        for slot, base in self._slots.elsewhere(at, now):
            for index, offset in slot.words:
                words[index] = base + offset
        self._words_at = now


class Executables:
    """The executables of one graph and their table, the compiled helper's if it is there."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        parameters: Parameters,
        slots: Slots,
        bulk: Bulk,
        stream: int,
        note: Callable[[str], None],
    ) -> None:
        """Make the first one; for `note` see `Instances`. Raises DriverError."""
        self._slots = slots
        self._instances = instances = Instances(driver, graph, parameters, stream, note)
        limit = most_executables(len(parameters))
        self._table: Table | None = None
        self.native: Any = None
        """What a `Call` binds by; None: it is Python's."""
        try:
            self.native = bulk.table(
                slots.numbers(parameters.writes_by_address()),
                parameters.words,
                instances.handles[0],
                (limit, WORTH, IDLE_CALLS),
                instances.make,
                parameters.fail_to_write,
            )
            if self.native is None:
                self._table = Table(slots, parameters, instances, limit)
        except BaseException:
            instances.close()
            raise
        self._bulk = bulk

    def __len__(self) -> int:
        """Return how many executables there are."""
        return len(self._instances.handles)

    def bind(self, inputs: list[Any], memory: list[Any], stream: int) -> tuple[int, int]:
        """See `Table.bind`."""
        if self._table is not None:
            return self._table.bind(inputs, memory, stream)
        found = self._bulk.bind(self.native, inputs, memory, stream)
        if found is None:
            self._raise_misfit(self._slots.places(inputs, memory))
        return found

    def _raise_misfit(self, now: Sequence[int]) -> NoReturn:
        for _ in self._slots.elsewhere(None, now):
            pass
        raise FallbackError("the compiled helper does not find where its inputs lie")

    def close(self) -> None:
        """Destroy all executables."""
        self._table = self.native = None
        self._instances.close()
