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
_UNLIKELY = 4 << 40
"""An offset of a generator that is not met by chance; a multiple of 4."""
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
    """Another state in the place of the one that a device's default generator has, where a capture begins.

    Up to torch 2.12 each capture marks the default state as captured, and then any random number that another thread draws raises. A
    capture that began so cannot draw from the default generator. Between `begin` and `end` other threads may run for some moments.
    """

    def __init__(self, device_index: int) -> None:
        self._default: Any = torch.cuda.default_generators[device_index]
        self._state: Any = None
        self._apart: Any = None
        self._seed = self._offset = 0
        self._is_in_place = False

    def begin(self) -> None:
        """Put another state in place, with the same seed and offset. To be called once."""
        self._state = self._default.graphsafe_get_state()
        self._apart = self._state.clone_state()
        self._seed, self._offset = self._apart.initial_seed(), self._apart.get_offset()
        self._is_in_place = True
        self._default.graphsafe_set_state(self._apart)

    def end(self) -> None:
        """Put the default state back, with what other threads have done to the other one meanwhile. Does nothing the second time."""
        if not self._is_in_place:
            return
        now = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._state)
        self._is_in_place = False
        # From here on nobody draws from the other state, unless the program has taken hold of it.
        try:
            seed, offset = self._apart.initial_seed(), self._apart.get_offset()
            self._apart.set_offset(offset + _UNLIKELY)
            is_replaced = now.get_offset() != offset + _UNLIKELY
            self._apart.set_offset(offset)
        except RuntimeError:  # the capture has begun already, and nothing may be asked
            return
        if is_replaced:
            self._default.graphsafe_set_state(now)  # by one of the program's own
        if seed != self._seed or offset < self._offset:
            self._state.manual_seed(seed)
            self._state.set_offset(offset)
        elif offset > self._offset:
            self._state.set_offset(self._state.get_offset() + offset - self._offset)
