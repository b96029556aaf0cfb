"""What stands in Inductor's place for one partition, for good: whatever runs the partition is put into it, and taken out again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygraphd.client.backend.torch_private import Runnable


class Slot:
    """One partition's callable; call it with the list of inputs that Inductor hands over."""

    __slots__ = ("__weakref__", "_changing", "run")

    def __init__(self, run: Runnable) -> None:
        """Begin with what runs the partition at first."""
        self.run = run
        self._changing = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        return self.run(inputs)

    def replace(self, one: Runnable, other: Runnable) -> bool:
        """Put one callable in the place of another; return whether that was there."""
        with self._changing:
            if self.run is not one:
                return False
            self.run = other
            return True
