"""Waits of other threads for a device begin after a capture, and their random numbers are not those of the capture."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import other_threads
from pygraphd.client.backend.torch_private.other_threads import DEVICE_WAITS, StateApart

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

    def __init__(self, offset: int = 0) -> None:
        self.state = [offset]

    def graphsafe_get_state(self) -> Generator:
        found = Generator()
        found.state = self.state
        return found

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def clone_state(self) -> Generator:
        return Generator(self.state[0])

    def get_offset(self) -> int:
        return self.state[0]

    def set_offset(self, offset: int) -> None:
        self.state[0] = offset


@pytest.mark.parametrize("drawn", [0, 8])
def test_numbers_that_others_draw_while_a_capture_begins_are_not_drawn_again(
    monkeypatch: pytest.MonkeyPatch, drawn: int
) -> None:
    default = Generator(100)
    state = default.state
    monkeypatch.setattr(torch.cuda, "default_generators", (default,))

    apart = StateApart(0)
    with apart:
        assert default.state is not state
        default.set_offset(default.get_offset() + drawn)
    assert default.state is state
    default.set_offset(default.get_offset() + 4)
    apart.settle()

    assert default.get_offset() == 104 + drawn


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
