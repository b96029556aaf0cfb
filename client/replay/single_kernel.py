"""A graph of one kernel, which is launched by cuLaunchKernel. There is no executable to take GPU memory, or to be written.

The node parameters are the arguments of the launch. So a call writes its addresses into them, and the driver is not told of that.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, NoReturn

from pygraphd.client.backend.driver import Driver, DriverError
from pygraphd.client.replay.segments import Segment, table_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.replay.native.ffi import TensorOps
    from pygraphd.client.replay.node_params import Parameters

NEVER_WORTH = 2
"""More than the number of nodes: no call is worth another executable."""
_LAUNCH = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)


class SingleKernel:
    """Takes the place of the executables of a graph with one kernel; see `Executables`."""

    can_launch_profiled = True

    def __init__(
        self, driver: Driver, parameters: Parameters, segments: Sequence[Segment], ops: TensorOps
    ) -> None:
        """Prepare the launch of the kernel in `parameters`, which `Parameters.is_single_kernel` has been asked about."""
        self._parameters = parameters
        self.segments = segments
        # `Kernel` of `exec_table.h`: what stands for an executable.
        # Kept here, as the table has its address only.
        self._kernel = (c_uint64 * 2)(driver.kernel_launch_address, parameters.writes[0][2])
        self.launch_address, write = ops.kernel_functions()
        self._launch = _LAUNCH(self.launch_address)
        # `write` does nothing: the launch itself reads the words.
        numbers = table_numbers(segments, [(write, *parameters.writes[0][1:])])
        limits = (1, NEVER_WORTH, 0)
        self.table: Any = ops.table(
            numbers, parameters.words, ctypes.addressof(self._kernel), *limits, _none, _none
        )

    def __len__(self) -> int:
        return 0

    def launch(self, kernel: int, stream: int) -> None:
        """Launch the kernel that `TensorOps.bind` has returned, on a stream of the current device."""
        code = self._launch(kernel, stream)
        if code:
            self.fail_launch(code)

    @staticmethod
    def fail_launch(code: int) -> NoReturn:
        """Raise DriverError for a code that cuLaunchKernel has returned."""
        raise DriverError("cuLaunchKernel", code)

    def close(self) -> None:
        """Let go of the table; launches that still run go on."""
        self.table = None


def _none(*_: object) -> None:
    """Stand for functions that are called for executables only."""
