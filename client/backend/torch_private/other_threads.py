"""Keeps a capture of a CUDA graph and the program's other threads from disturbing one another."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEVICE_WAITS = ("_cuda_synchronize", "_accelerator_synchronizeDevice")
"""The functions of `torch._C` that wait for all streams of a device."""
_UNLIKELY = 4 << 40
"""An offset of a generator that is not met by chance; a multiple of 4."""
LONGEST_S = 10.0
"""Longest time in seconds that another thread's wait is put off. Then it is begun, which raises in that thread and ends the capture."""
BEGUN_S = 1.0
"""Longest time in seconds that a capture waits for waits that began before it: one may last, as for another device."""
_POLL_S = 0.0005


class _Gate:
    """Lets other threads begin to wait for a device only while nothing is captured.

    It has no lock: an exception of a signal handler, as of Ctrl-C, may come at any moment, and a lock would stay held.
    """

    def __init__(self) -> None:
        self._capturing: int | None = None
        self._waiting = dict[object, int]()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate for all threads but this one, once the waits that are beyond it have ended."""
        mine = threading.get_ident()
        # Captures are made one at a time: what another thread has left there is that of an interrupted one.
        before = mine if self._capturing == mine else None
        try:
            self._capturing = mine
            last = time.monotonic() + LONGEST_S
            while any(each != mine for each in list(self._waiting.values())) and time.monotonic() < last:
                time.sleep(_POLL_S)
            yield
        finally:
            self._capturing = before

    def wait(self, wait: Callable[..., Any], *arguments: Any) -> Any:
        """Call `wait` once the gate is open, or has been closed for too long."""
        thread, this_one = threading.get_ident(), object()
        last: float | None = None
        try:
            # First, or a capture could begin between the question and the wait.
            self._waiting[this_one] = thread
            while self._capturing not in {None, thread} and (last is None or time.monotonic() < last):
                last = time.monotonic() + LONGEST_S if last is None else last
                del self._waiting[this_one]
                time.sleep(_POLL_S)
                self._waiting[this_one] = thread
            return wait(*arguments)
        finally:
            self._waiting.pop(this_one, None)


_gate = _Gate()
"""One for the process: a thread that one capture has put off may not have gone on when the next one begins."""


@contextlib.contextmanager
def device_waits_put_off() -> Iterator[None]:
    """Have other threads that wait for a whole device, as in `torch.cuda.synchronize`, begin to once this block has ended.

    CUDA forbids that wait while any thread captures: it would raise in the other thread, and end the capture. The block begins when no
    other thread is in such a wait, or after `LONGEST_S`; after `BEGUN_S` where the wait began before the block.
    """
    originals = {name: getattr(torch._C, name) for name in DEVICE_WAITS if hasattr(torch._C, name)}
    ours = {name: functools.partial(_gate.wait, each) for name, each in originals.items()}
    try:
        for name, each in ours.items():
            setattr(torch._C, name, each)
        with _gate.closed():
            _wait_for_others()
            yield
    finally:
        for name, each in ours.items():
            if getattr(torch._C, name) is each:
                setattr(torch._C, name, originals[name])


def _wait_for_others() -> None:
    # The innermost Python function of a thread tells, for a wait that began before the gate was there.
    last = time.monotonic() + BEGUN_S
    callers = (torch.cuda.synchronize, torch.accelerator.synchronize)
    codes = [getattr(each, "__code__", None) for each in callers]
    while _others_run(codes) and time.monotonic() < last:
        time.sleep(_POLL_S)


def _others_run(codes: Sequence[Any]) -> bool:
    frames = sys._current_frames()
    # Or this frame would hold itself, and with it all variables of the other threads.
    del frames[threading.get_ident()]
    return any(frame.f_code in codes for frame in frames.values())


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
