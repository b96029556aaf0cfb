"""Keeps a capture of a CUDA graph and the program's other threads from disturbing one another."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE_WAITS = ("_cuda_synchronize", "_accelerator_synchronizeDevice")
"""The functions of `torch._C` that wait for all streams of a device."""
LONGEST_S = 10.0
"""Longest time in seconds that another thread's wait is put off. Then it is begun, which raises in that thread and ends the capture."""


@contextlib.contextmanager
def device_waits_put_off() -> Iterator[None]:
    """Have other threads that wait for a whole device, as in `torch.cuda.synchronize`, begin to once this block has ended.

    CUDA forbids that wait while any thread captures: it would raise in the other thread, and end the capture.
    """
    is_over, thread = threading.Event(), threading.get_ident()
    originals = {name: getattr(torch._C, name) for name in DEVICE_WAITS if hasattr(torch._C, name)}
    ours = {name: functools.partial(_once_over, is_over, thread, each) for name, each in originals.items()}
    try:
        for name, each in ours.items():
            setattr(torch._C, name, each)
        yield
    finally:
        for name, each in ours.items():
            if getattr(torch._C, name) is each:
                setattr(torch._C, name, originals[name])
        is_over.set()


def _once_over(is_over: threading.Event, thread: int, wait: Callable[..., Any], *arguments: Any) -> Any:
    if threading.get_ident() != thread:
        is_over.wait(LONGEST_S)
    return wait(*arguments)


class StateApart:
    """Another state in the place of the one that a device's default generator has, while a capture begins.

    Up to torch 2.12 each capture marks the default state as captured, and then any random number that another thread draws raises. A
    capture that began so cannot draw from the default generator.
    """

    def __init__(self, device_index: int) -> None:
        self._default: Any = torch.cuda.default_generators[device_index]
        self._state = self._default.graphsafe_get_state()
        self._apart = self._state.clone_state()
        self._begun_at: int = self._apart.get_offset()

    def __enter__(self) -> None:
        self._default.graphsafe_set_state(self._apart)

    def __exit__(self, *_: object) -> None:
        self._default.graphsafe_set_state(self._state)

    def settle(self) -> None:
        """Advance the default state by what other threads have drawn from the other one. To be called after the capture."""
        drawn = self._apart.get_offset() - self._begun_at
        if drawn:
            self._state.set_offset(self._state.get_offset() + drawn)
