"""Waits of other threads for a device begin after a capture, and their random numbers are not those of the capture."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import other_threads
from pygraphd.client.backend.torch_private.other_threads import DEVICE_WAITS, StateApart, _Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.torch


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Have each wait for a device noted, since there is none."""
    begun: list[tuple[Any, ...]] = []
    for name in DEVICE_WAITS:
        monkeypatch.setattr(torch._C, name, lambda *arguments: begun.append(arguments), raising=False)
    return begun


@pytest.mark.parametrize(("name", "arguments"), list(zip(DEVICE_WAITS, [(), (0,)], strict=True)))
def test_another_threads_wait_begins_after_the_capture(
    waits: list[tuple[Any, ...]], name: str, arguments: tuple[Any, ...]
) -> None:
    original, called = getattr(torch._C, name), threading.Event()

    def wait() -> None:
        found = getattr(torch._C, name)  # as `torch.cuda.synchronize` does at each call
        called.set()
        found(*arguments)

    thread = threading.Thread(target=wait)
    with torch_private.device_waits_put_off():
        thread.start()
        called.wait()
        assert waits == []
        getattr(torch._C, name)("mine")
        assert waits == [("mine",)]
    thread.join()

    assert waits == [("mine",), arguments]
    assert getattr(torch._C, name) is original


def test_a_wait_that_one_capture_has_put_off_does_not_begin_within_the_next(
    waits: list[tuple[Any, ...]],
) -> None:
    called = threading.Event()

    def wait() -> None:
        found = torch._C._cuda_synchronize
        called.set()
        found()

    threads = [threading.Thread(target=wait) for _ in range(4)]
    with torch_private.device_waits_put_off():
        for each in threads:
            called.clear()
            each.start()
            called.wait()
    for _ in range(20):
        with torch_private.device_waits_put_off():
            begun = len(waits)
            time.sleep(0.002)  # the threads may run
            assert len(waits) == begun
    for each in threads:
        each.join()

    assert waits == [()] * 4


@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator], ids=["cuda", "accelerator"])
def test_a_capture_begins_when_the_waits_that_have_begun_are_over(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    """They may be in C++, where nothing can be put in their way."""
    gpu_is_done, order, looked_up = threading.Lock(), list[str](), threading.Event()
    monkeypatch.setattr(torch._C, "_cuda_synchronize", gpu_is_done.acquire, raising=False)

    def synchronize() -> None:
        wait = torch._C._cuda_synchronize
        looked_up.set()
        wait()
        order.append("wait over")

    def capture() -> None:
        with torch_private.device_waits_put_off():
            order.append("capture")

    monkeypatch.setattr(module, "synchronize", synchronize)
    gpu_is_done.acquire()
    waiting, capturing = threading.Thread(target=synchronize), threading.Thread(target=capture)
    waiting.start()
    looked_up.wait()
    while sys._current_frames()[waiting.ident or 0].f_code is not synchronize.__code__:
        time.sleep(0)
    capturing.start()
    time.sleep(0.05)  # enough for a capture that would not wait
    gpu_is_done.release()
    waiting.join()
    capturing.join()

    assert order == ["wait over", "capture"]


def test_a_wait_that_lasts_does_not_keep_captures_from_beginning(
    monkeypatch: pytest.MonkeyPatch, waits: list[tuple[Any, ...]]
) -> None:
    """As a thread that waits for another device all the time."""
    monkeypatch.setattr(other_threads, "BEGUN_S", 0.0)
    is_over, begun = threading.Event(), threading.Event()

    def synchronize() -> None:
        begun.set()
        while not is_over.is_set():
            pass

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    thread = threading.Thread(target=synchronize)
    thread.start()
    begun.wait()
    with torch_private.device_waits_put_off():
        is_over.set()
    thread.join()


class Interrupted(BaseException):
    """As KeyboardInterrupt, which a signal handler raises at any moment."""


@pytest.mark.parametrize("name", ["closed", "wait"])
def test_an_interrupt_leaves_the_gate_as_it_was(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Else each later capture and each wait of the process would be late, or never begin."""
    monkeypatch.setattr(other_threads, "LONGEST_S", 0.0)
    function = inspect.unwrap(getattr(_Gate, name))
    text, first = inspect.getsourcelines(function)
    stripped = [each.strip() for each in text]
    lines = range(first + stripped.index("try:") + 1, first + stripped.index("finally:"))
    stranger, raised = object(), 0
    for interrupted_at in lines:
        gate = _Gate()
        gate._capturing, gate._waiting = -1, {stranger: -1}  # another thread's, so that each line runs

        def trace(frame: Any, event: str, _: object, line: int = interrupted_at) -> Any:
            if frame.f_code is function.__code__ and event == "line" and frame.f_lineno == line:
                raise Interrupted
            return trace

        with contextlib.suppress(Interrupted):
            sys.settrace(trace)
            try:
                if name == "wait":
                    gate.wait(lambda: None)
                else:
                    with gate.closed():
                        pass
            except Interrupted:
                raised += 1
                raise
            finally:
                sys.settrace(None)
        # What an interrupted capture of another thread has left is gone then.
        assert gate._capturing == (-1 if name == "wait" else None), interrupted_at
        assert gate._waiting == {stranger: -1}

    assert raised >= 4


def test_looking_for_the_waits_of_others_keeps_nothing_of_theirs() -> None:
    """The frames of threads hold their variables, such as tensors of gigabytes."""

    class Large:
        pass

    def work() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        started.set()
        over.wait()

    kept, started, over = list["weakref.ref[Large]"](), threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    gc.disable()
    try:
        with torch_private.device_waits_put_off():
            pass
        over.set()
        thread.join()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_wait_is_not_put_off_for_longer_than_the_limit(
    waits: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that captures may wait for a lock of the program that the other one holds."""
    monkeypatch.setattr(other_threads, "LONGEST_S", 0.0)
    with torch_private.device_waits_put_off():
        thread = threading.Thread(target=lambda: torch._C._cuda_synchronize())
        thread.start()
        thread.join()
        assert waits == [()]


def test_a_function_that_the_program_has_put_there_meanwhile_stays(waits: list[tuple[Any, ...]]) -> None:
    with torch_private.device_waits_put_off():
        torch._C._cuda_synchronize = mine = lambda: None
    assert torch._C._cuda_synchronize is mine


class Generator:
    """A generator over a state that others may have, too, as PyTorch's on GPUs are."""

    def __init__(self, seed: int = 1, offset: int = 100) -> None:
        self.state = [seed, offset]

    def graphsafe_get_state(self) -> Generator:
        found = Generator()
        found.state = self.state
        return found

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def clone_state(self) -> Generator:
        return Generator(*self.state)

    def initial_seed(self) -> int:
        return self.state[0]

    def get_offset(self) -> int:
        return self.state[1]

    def set_offset(self, offset: int) -> None:
        self.state[1] = offset

    def manual_seed(self, seed: int) -> None:
        self.state[:] = seed, 0

    def draw(self) -> tuple[int, int]:
        """Return what the next four numbers follow from."""
        seed, offset = self.state
        self.state[1] += 4
        return seed, offset


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Generator:
    made = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    return made


def test_numbers_that_others_draw_where_a_capture_begins_are_drawn_once(default: Generator) -> None:
    apart, state = StateApart(0), default.state
    apart.begin()
    assert default.state is not state
    drawn = [default.draw(), default.draw()]
    apart.end()
    assert default.state is state
    drawn += [default.draw()]
    apart.end()
    drawn += [default.draw()]

    assert drawn == [(1, 100 + 4 * number) for number in range(4)]


@pytest.mark.parametrize("before", ["initial_seed", "get_offset", "set_offset", "graphsafe_set_state"])
def test_a_number_drawn_at_any_moment_of_putting_the_state_back_is_drawn_once(
    default: Generator, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Threads draw in C++, where no lock of Python's keeps them from it."""
    apart, drawn, original = StateApart(0), list[tuple[int, int]](), getattr(Generator, before)

    def draw_first(generator: Generator, *arguments: Any) -> Any:
        drawn.append(default.draw())
        return original(generator, *arguments)

    apart.begin()
    with monkeypatch.context() as patch:
        patch.setattr(Generator, before, draw_first)
        apart.end()
    drawn += [default.draw(), default.draw()]

    assert sorted(drawn) == [(1, 100 + 4 * number) for number in range(len(drawn))]


def test_a_seed_that_is_set_where_a_capture_begins_holds(default: Generator) -> None:
    apart, state = StateApart(0), default.state
    apart.begin()
    default.manual_seed(7)
    default.draw()
    apart.end()

    assert default.state is state
    assert default.draw() == (7, 4)


def test_a_state_that_the_program_puts_in_place_where_a_capture_begins_stays(default: Generator) -> None:
    """As trackers of random numbers for tensor parallelism do; what it puts back later is the default one."""
    apart, state, own = StateApart(0), default.graphsafe_get_state(), Generator(3, 8)
    apart.begin()
    default.graphsafe_set_state(own)
    apart.end()

    assert default.draw() == (3, 8)
    default.graphsafe_set_state(state)
    assert default.draw() == (1, 100)


def test_the_state_is_put_back_where_nothing_may_be_asked_any_more(
    default: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default one is marked as captured then, as without all this, and nothing raises."""

    def fail(_: object) -> int:
        raise RuntimeError("Cannot call get_offset during capture")

    apart, state = StateApart(0), default.state
    apart.begin()
    with monkeypatch.context() as patch:
        patch.setattr(Generator, "get_offset", fail)
        apart.end()

    assert default.state is state
    assert default.draw() == (1, 100)


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda x: (x @ x).softmax(-1).sum(), [False]),
        (lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x), [True]),
        (lambda x: torch.bernoulli(x.sigmoid()), [True]),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), [False]),
        (lambda x: torch.ops.drawing_tests.unknown(x) + 1, [True]),
    ],
)
def test_graphs_that_may_draw_are_told_from_others(
    function: Callable[[torch.Tensor], torch.Tensor], draws: Sequence[bool], own_operator: None
) -> None:
    found = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Any) -> None:
        found.append(torch_private.facts(compiled, graph_kwargs).may_draw)
        original()

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(function)(torch.randn(1, 2, 16, 16))
    finally:
        uninstall()
        torch._dynamo.reset()

    assert found == draws


@pytest.fixture(scope="module")
def own_operator() -> None:
    """Define an operator of the program's, of which nobody knows whether it draws."""

    @torch.library.custom_op("drawing_tests::unknown", mutates_args=())  # type: ignore[untyped-decorator]
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    unknown.register_fake(torch.empty_like)
