"""A graph of one kernel: that kernel is launched instead, with arguments that follow a call's tensors, and there is no executable.

Launching an executable takes longer than launching a kernel, writing to one takes as long again, and making one for each set of
addresses as long as many launches. Of several kernels, one might fail to be launched when others have run.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from pygraphd.client.binding import Binding, MisfitError
from pygraphd.client.driver import DriverError, KernelAttribute, LaunchConfig
from pygraphd.client.misfits import Misfit

if TYPE_CHECKING:
    from collections.abc import Collection

    from pygraphd.client.binding import Fresh
    from pygraphd.client.driver import Driver, KernelNodeParams
    from pygraphd.client.parameters import Parameters

_CALL = "cuLaunchKernelEx"
_SIZES = (*(f"{what}Dim{axis}" for what in ("grid", "block") for axis in "XYZ"), "sharedMemBytes")


class Arguments(Binding):
    """A `Binding` to no executable: what was written is read at the next launch."""

    def _instantiated(self) -> int:
        return 0

    def _write(self, nodes: Collection[int]) -> None:
        """Do nothing."""


class SingleKernel:
    """Stands where `Bindings` do."""

    made = 0
    """Executables so far."""

    def __init__(self, arguments: Arguments) -> None:
        """Take what can `follow` a call's tensors."""
        self._arguments = arguments
        self.written = 0
        """Kernels whose arguments have changed for the latest call."""

    def __len__(self) -> int:
        """Return how many executables there are."""
        return 0

    def bound(self, inputs: list[Any], memory: list[Any], number: int, _fresh: Fresh) -> Binding:
        """See `Bindings`."""
        written = self._arguments.follow(inputs, memory, number)
        if written is None:
            raise MisfitError(Misfit.ALIGNMENT)
        self.written = max(written, 0)
        return self._arguments

    def expected(self, number: int) -> Binding | None:
        """See `Bindings`."""
        return self._arguments if self._arguments.number == number else None

    def came(self, _binding: Binding) -> None:
        """See `Bindings`."""
        self.written = 0

    def close(self) -> None:
        """See `Bindings`."""


class Kernel:
    """Launches a kernel as a node of a graph does."""

    def __init__(self, driver: Driver, params: KernelNodeParams) -> None:
        """Take what it is launched with; its arguments are read at each launch."""
        self._config = LaunchConfig(**{name: getattr(params, name) for name in _SIZES})
        self._at = ctypes.addressof(self._config)
        self._launch = driver.kernel_launcher()
        self._what = params.func or params.kern, params.kernelParams, params.extra

    def launch(self, _executable: int, stream: int) -> None:
        """Do so on a stream of the current device, one thread at a time; raises DriverError."""
        self._config.hStream = stream
        code = self._launch(self._at, *self._what)
        if code:
            raise DriverError(_CALL, code)


def kernel_of(driver: Driver, parameters: Parameters) -> Kernel | None:
    """Return what launches a graph of one kernel; None for any other, or if this one is launched in a manner of its own."""
    found = parameters.only_kernel()
    if found is None:
        return None
    node, params = found
    try:
        cooperative = driver.kernel_attribute(node, KernelAttribute.COOPERATIVE)
        cluster = driver.kernel_attribute(node, KernelAttribute.CLUSTER_DIMENSION)
    except DriverError:
        return None  # one that does not tell
    # A cluster of one block is none; without, all are 0.
    return None if any(cooperative) or max(cluster) > 1 else Kernel(driver, params)
