"""The permanent callable in Inductor's place for one partition; it lives as long as its compiled graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygraphd.client.backend.torch_private import Runnable


class Slot:
    """The permanent callable of one partition, on Inductor's list of inputs. `run` serves its calls, and may be exchanged at any time.

    A call runs `run` without a Python frame of its own: `__call__` is the descriptor of `run`, which the interpreter resolves in C.
    """

    # `Partition` refers to its slot weakly.
    __slots__ = ("__weakref__", "run")

    def __init__(self, run: Runnable) -> None:
        self.run = run

    if TYPE_CHECKING:

        def __call__(self, inputs: list[Any]) -> Any:
            """Run the partition on Inductor's list of inputs."""


# After the class, within whose body the descriptor of `run` does not exist yet.
Slot.__call__ = Slot.__dict__["run"]  # type: ignore[method-assign]
