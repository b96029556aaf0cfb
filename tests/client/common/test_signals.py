"""Signal handlers that are put off run after the block; all else about signals stays as the program has set it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pygraphd.client.common import signals
from pygraphd.client.common.signals import handlers_put_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Have two signals noted, whose handlers are the program's."""
    came: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGUSR2)}
    for each in before:
        signal.signal(each, lambda number, _: came.append(number))
    yield came
    for each, handler in before.items():
        signal.signal(each, handler)


def strike(number: int) -> None:
    os.kill(os.getpid(), number)


def test_handlers_run_after_the_block_in_the_order_of_their_signals(seen: list[int]) -> None:
    with handlers_put_off():
        strike(signal.SIGUSR2)
        strike(signal.SIGUSR1)
        assert seen == []
    assert seen == [signal.SIGUSR2, signal.SIGUSR1]

    strike(signal.SIGUSR1)
    assert seen == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1]


def test_they_run_after_the_outermost_block_and_after_one_that_fails(seen: list[int]) -> None:
    with contextlib.suppress(ZeroDivisionError), handlers_put_off():
        with handlers_put_off():
            strike(signal.SIGUSR1)
        assert seen == []
        raise ZeroDivisionError
    assert seen == [signal.SIGUSR1]


@pytest.mark.parametrize("inner", [contextlib.nullcontext, handlers_put_off])
def test_a_signal_that_comes_twice_is_not_put_off_again(
    seen: list[int], inner: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """Also within two blocks: a capture is one within that of its recording."""
    with handlers_put_off():
        with inner():
            strike(signal.SIGUSR1)
            strike(signal.SIGUSR1)
            assert seen == [signal.SIGUSR1]
        assert seen == [signal.SIGUSR1]
    assert seen == [signal.SIGUSR1] * 2


def test_what_a_handler_raises_is_raised_after_the_block_and_the_others_run(seen: list[int]) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGUSR1, fail)

    def both() -> None:
        with handlers_put_off():
            strike(signal.SIGUSR1)
            strike(signal.SIGUSR2)
            assert seen == []

    with pytest.raises(TimeoutError):
        both()
    assert seen == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is fail


def test_ctrl_c_and_timers_are_not_put_off() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    is_put_off = False
    try:
        with handlers_put_off():
            strike(signal.SIGINT)
            is_put_off = True
    except KeyboardInterrupt:
        assert not is_put_off
    else:
        pytest.fail("it got lost")
    finally:
        signal.signal(signal.SIGINT, before)

    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: came.append(number))
    try:
        with handlers_put_off():
            strike(signal.SIGALRM)
            assert came == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_another_thread_puts_nothing_off(seen: list[int]) -> None:
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with handlers_put_off():
            begun.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    strike(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    over.set()
    thread.join()


def test_a_child_forked_by_another_thread_does_not_wait_for_a_block_that_never_ends(seen: list[int]) -> None:
    ready, tell = os.pipe()

    def fork() -> None:
        if not (child := os.fork()):
            os.write(tell, b"1")  # before that, Python forgets signals that have come
            for _ in range(10_000):
                time.sleep(0.001)  # handlers run in the thread that is the main one of the child
                if seen:
                    os._exit(0)
            os._exit(1)
        children.append(child)

    children: list[int] = []
    with handlers_put_off():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    os.read(ready, 1)
    os.kill(children[0], signal.SIGUSR1)

    assert os.waitpid(children[0], 0)[1] == 0
    assert seen == []
    os.close(ready)
    os.close(tell)


def test_what_a_signal_interrupts_is_not_kept_until_its_handler_runs(seen: list[int]) -> None:
    """Tensors of a capture would look like memory that the graph keeps."""

    class Tensor:
        pass

    def interrupted() -> weakref.ref[Tensor]:
        tensor = Tensor()
        strike(signal.SIGUSR1)
        return weakref.ref(tensor)

    with handlers_put_off():
        assert interrupted()() is None
        assert seen == []
    assert seen == [signal.SIGUSR1]


@pytest.mark.parametrize("comes", [False, True])
def test_the_block_keeps_no_frame_of_its_callers(seen: list[int], comes: bool) -> None:
    """Their variables hold tensors, and a recording that lacks memory is refused on the spot."""

    class Tensor:
        pass

    def caller() -> weakref.ref[Tensor]:
        tensor = Tensor()
        with handlers_put_off():
            if comes:
                strike(signal.SIGUSR1)
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
    assert bool(seen) is comes


def test_what_a_handler_raises_keeps_no_frame_of_the_callers(seen: list[int]) -> None:
    """A program that ends a step at a time limit, and goes on, has the step's memory again."""

    class Tensor:
        pass

    def fail(*_: object) -> None:
        raise TimeoutError

    def caller() -> None:
        tensor = Tensor()
        tensors.append(weakref.ref(tensor))
        with handlers_put_off():
            strike(signal.SIGUSR1)
            strike(signal.SIGUSR2)

    tensors: list[weakref.ref[Tensor]] = []
    signal.signal(signal.SIGUSR1, fail)
    gc.disable()
    try:
        with contextlib.suppress(TimeoutError):
            caller()
        assert tensors[0]() is None
    finally:
        gc.enable()
    assert seen == [signal.SIGUSR2]


def test_a_timer_that_raises_where_the_block_ends_loses_no_signal(
    seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise TimeoutError

    def ended() -> None:
        with handlers_put_off():
            strike(signal.SIGUSR1)
            monkeypatch.setattr(signals, "_exchange", fail)

    try:
        with pytest.raises(TimeoutError):
            ended()
    finally:
        monkeypatch.undo()
    assert seen == [signal.SIGUSR1]
    strike(signal.SIGUSR2)  # what was not put back calls the program's handler at once
    assert seen == [signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("interrupts", [False, True])
def test_calls_that_a_signal_interrupts_go_on_as_the_program_has_set_it(
    seen: list[int], interrupts: bool
) -> None:
    """As `asyncio` does for its handlers. Python's `signal.signal` would set it back."""
    signal.siginterrupt(signal.SIGUSR1, interrupts)
    before = action(signal.SIGUSR1)

    with handlers_put_off():
        assert action(signal.SIGUSR1) == before
        strike(signal.SIGUSR1)

    assert action(signal.SIGUSR1) == before
    assert seen == [signal.SIGUSR1]


def action(number: int) -> bytes:
    """Return the handler, the first 64 blocked signals, and the flags that the C library has for a signal, as Linux on 64 bits lays them out."""
    libc: Any = ctypes.CDLL(None)
    found = ctypes.create_string_buffer(1024)
    assert libc.sigaction(int(number), None, found) == 0
    return found.raw[:16] + found.raw[136:140]
