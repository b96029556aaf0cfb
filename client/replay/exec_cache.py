"""The executables of one recording, and the rules by which the helper's table (`exec_table.h`) finds one for the addresses of a call.

A call needs no write if an executable is bound to its addresses. Other addresses are written to the first executable, at 0.5 to 0.7 us
of host time a node. A set of addresses that comes again gets an executable of its own if that saves enough. So alternating sets, like the
weights of layers that share a graph, soon need no more writes. An executable costs some hundred us once, and about 3 KB of GPU memory a node.

With more sets in rotation than executables, replacing the least recently used one would evict each set just before it comes again. So
only an executable that was not used for long is bound to other addresses; else the first one is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import Driver, DriverError
from pygraphd.client.backend.errors import ProfiledError
from pygraphd.client.replay.segments import Segment, table_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.replay.native.ffi import TensorOps
    from pygraphd.client.replay.node_params import Parameters

FEW_EXECUTABLES = 4
"""Maximum number of executables of a large graph."""
MAX_EXECUTABLES = 64
"""Maximum number of executables of a small graph: the layers of a model may share one graph."""
MAX_NODES = 1_024
"""Maximum number of nodes in all executables of a graph that has more than `FEW_EXECUTABLES`."""
WORTH = 4
"""The number of nodes to write from which on a graph of any size gets another executable: writing them takes about as long as a launch."""
NODES_A_WRITE = 64
"""A graph of fewer nodes gets another executable from one node to write on; each further 64 nodes add one, up to `WORTH`."""
IDLE_CALLS = 256
"""Number of calls without use after which an executable may be bound to other addresses."""

ONE_LESS = "addresses take turns and share an executable"


def most_executables(nodes: int) -> int:
    """Return the maximum number of executables of a graph with this number of nodes."""
    return max(FEW_EXECUTABLES, min(MAX_EXECUTABLES, MAX_NODES // max(nodes, 1)))


def least_to_write(nodes: int) -> int:
    """Return the least number of nodes to write for which a graph with this number of nodes gets another executable."""
    return min(WORTH, 1 + nodes // NODES_A_WRITE)


class Executables:
    """The executables of one graph, and the helper's table of them."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        parameters: Parameters,
        segments: Sequence[Segment],
        ops: TensorOps,
        stream: int,
        note: Callable[[str], None],
    ) -> None:
        """Make the first executable, unless the graph copies; then it is made at the first call.

        In an executable, the driver refuses a copy whose new addresses are mapped otherwise than those of its instantiation, and a capture
        may have had addresses of aliased memory. `note` is called with the reason when another executable cannot be made. Raises DriverError.
        """
        self._driver = driver
        self.launch, self.launch_address = driver.launch, driver.launch_address
        self.fail_launch = driver.fail_launch
        self._graph = graph
        self._parameters = parameters
        self.segments = segments
        self._note = note
        self._retired: list[int] = []
        """Executables that others have replaced in the table."""
        self.can_launch_profiled = True
        """False once an executable with copies or memsets was made after torch had first prepared a profiler.

        CUPTI, which the profiler attaches and leaves, has such executables point to the driver's records of the memory that they were made
        with. Once that memory has gone back to the device, a launch under a profile ends the process with a segmentation fault (H200,
        driver 580, CUPTI 13.0). Other launches are not affected.
        """
        self._keep_from_profiles = ops.keep_from_profiles
        self._handles = [] if parameters.has_copies else [driver.instantiate(graph, stream)]
        self.table: Any = None
        """The table, which holds this object through `_make`: only `close` ends both."""
        try:
            numbers = table_numbers(segments, parameters.writes)
            nodes = len(parameters)
            limits = (most_executables(nodes), least_to_write(nodes), IDLE_CALLS)
            first = next(iter(self._handles), 0)
            self.table = ops.table(
                numbers, parameters.words, first, *limits, self._make, parameters.fail_to_write
            )
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._handles)

    def _make(self, stream: int, replaced: int) -> int | None:
        """Return another executable, bound to the addresses in the node parameters; None if the driver refuses.

        It takes the place of `replaced` (0: of none), of which launches that still run go on. While a profiler runs, none is made for a
        graph with copies or memsets: returns 0, or raises FallbackError if the call cannot do without. Raises DriverError if the first
        one cannot be made.

        The graph is written before: the addresses at which it was recorded may be unmapped by now, and the driver checks those of copies
        and memsets when it instantiates. Kernels of the first one are written as at any call.
        """
        is_first = not self._handles
        if self._parameters.has_copies and torch_private.is_profiled():
            if is_first or replaced:
                raise ProfiledError
            return 0  # it could not be launched now
        # No earlier: the table holds a replaced executable until it has been told of the new one.
        self._destroy(self._retired)
        try:
            # Another thread may be capturing, and CUDA's default mode then forbids such calls to all threads.
            with self._driver.relaxed():
                self._parameters.write_graph(but_kernels=is_first)
                self._handles.append(self._driver.instantiate(self._graph, stream))
            # Asked last: another thread may have begun a profile meanwhile.
            if self._parameters.has_copies and torch_private.was_profiled():
                self.can_launch_profiled = False
                self._keep_from_profiles(self.table)
        except DriverError as error:
            if is_first:
                raise
            if not replaced:
                self._note(f"{ONE_LESS}: {error}")
            return None
        if not replaced:
            return self._handles[-1]
        handles, retired = [each for each in self._handles if each != replaced], [replaced]
        # No call may follow, in which an interrupt would leave the old one in the table.
        self._handles, self._retired = handles, retired
        return handles[-1]

    def _destroy(self, handles: list[int]) -> None:
        while handles:
            with contextlib.suppress(DriverError):
                self._driver.destroy_executable(handles.pop())

    def close(self) -> None:
        """Destroy all executables; launches that still run go on."""
        self.table = None
        self._destroy(self._handles)
        self._destroy(self._retired)
