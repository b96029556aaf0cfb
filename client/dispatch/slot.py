"""What stands in Inductor's place for one partition, for as long as its compiled graph lives: whatever runs the partition is put into it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygraphd.client.backend.torch_private import Runnable


class Slot:
    """One partition's callable; call it with the list of inputs that Inductor hands over.

    A call runs `run` without a Python frame of its own: `__call__` is the descriptor of `run`, which the interpreter resolves in C.
    """

    __slots__ = ("__weakref__", "_changing", "run")

    def __init__(self, run: Runnable) -> None:
        """Begin with what runs the partition at first."""
        self.run = run
        self._changing = threading.Lock()

    if TYPE_CHECKING:

        def __call__(self, inputs: list[Any]) -> Any:
            """Run the partition on Inductor's list of inputs."""

    def replace(self, one: Runnable, other: Runnable) -> bool:
        """Put one callable in the place of another; return whether that was there."""
        with self._changing:
            if self.run is not one:
                return False
            self.run = other
            return True


Slot.__call__ = Slot.__dict__["run"]  # type: ignore[method-assign]
