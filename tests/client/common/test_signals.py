"""Signal handlers that are put off run after the block; all else about signals stays as the program has set it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.common.signals import handlers_put_off

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def test_a_signal_that_comes_twice_is_not_put_off_again(seen: list[int]) -> None:
    with handlers_put_off():
        strike(signal.SIGUSR1)
        strike(signal.SIGUSR1)
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
