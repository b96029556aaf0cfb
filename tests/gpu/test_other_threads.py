"""What other threads and signal handlers of a program do while a call is captured: as without a capture, and none of it is captured."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import driver
from pygraphd.client.recording.capture import CudaRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STREAMS = 40
"""More than PyTorch has: it deals them out again and again."""
MOST_DRAWN = 200_000
UNTIL_DONE_S = 30


class Beside:
    """Has another thread do something while a call is captured."""

    def __init__(self) -> None:
        self.x = torch.ones(64, 64, device="cuda")
        self.recorder = CudaRecorder(driver.load(), 0)
        _ = self.x @ self.x, torch.randn(4, device="cuda")
        self.capture(lambda: None)

    def capture(self, during: Callable[[], object], *, may_draw: bool = False) -> None:
        """Capture a call of one kernel that does something besides, and assert that nothing else is captured."""

        def program(_: list[Any]) -> list[torch.Tensor]:
            during()
            return [self.x + 1]

        captured = self.recorder.capture(program, [], may_draw=may_draw)
        nodes = len(self.recorder.driver.nodes(captured.graph))
        captured.discard(self.recorder.driver)
        assert nodes == 1

    def run(self, act: Callable[[Callable[[], None]], Any]) -> Any:
        """Return what `act` returns in another thread. The capture goes on until that has ended, or has called what it is given."""
        begun, over, found = threading.Event(), threading.Event(), list[Any]()

        def other() -> None:
            begun.wait()
            try:
                found.append(act(over.set))
            except Exception as error:  # noqa: BLE001 - whatever it is
                found.append(error)
            finally:
                over.set()

        def during() -> None:
            begun.set()
            assert over.wait(UNTIL_DONE_S)

        thread = threading.Thread(target=other)
        thread.start()
        self.capture(during)
        thread.join()
        torch.cuda.synchronize()
        return found[0]


@pytest.fixture
def beside() -> Beside:
    return Beside()


def test_work_on_any_stream_of_pytorchs_is_done(beside: Beside) -> None:
    def act(_: object) -> list[torch.Tensor]:
        made = []
        for number in range(STREAMS):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                made.append(beside.x * number)
            stream.synchronize()
        return made

    assert [each.mean().item() for each in beside.run(act)] == list(range(STREAMS))


@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator], ids=["cuda", "accelerator"])
def test_a_wait_for_the_device_neither_raises_nor_ends_the_capture(beside: Beside, module: Any) -> None:
    def act(let_go_on: Callable[[], None]) -> float:
        y = beside.x * 3
        threading.Timer(0.2, let_go_on).start()  # by then the wait has begun
        module.synchronize()
        return float(y.mean())

    assert beside.run(act) == 3


def test_random_numbers_are_those_that_are_drawn_without_a_capture(beside: Beside) -> None:
    def draw(_: object = None) -> torch.Tensor:
        return torch.randn(64, device="cuda")

    torch.cuda.manual_seed(7)
    expected = [draw() for _ in range(3)]
    torch.cuda.manual_seed(7)
    drawn = [draw(), beside.run(draw), draw()]

    for mine, right in zip(drawn, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


def test_a_thread_that_draws_all_the_time_draws_each_number_once(beside: Beside) -> None:
    """Also in the moments in which a capture begins."""
    drawn, failed, is_over = list[torch.Tensor](), list[Exception](), threading.Event()

    def draw() -> None:
        try:
            while not is_over.is_set() and len(drawn) < MOST_DRAWN:
                drawn.append(torch.randn(4, device="cuda"))
        except Exception as error:  # noqa: BLE001 - whatever it is
            failed.append(error)

    torch.cuda.manual_seed(7)
    thread = threading.Thread(target=draw)
    thread.start()
    for _ in range(40):
        beside.capture(lambda: time.sleep(0.001))
    is_over.set()
    thread.join()
    torch.cuda.manual_seed(7)
    expected = [torch.randn(4, device="cuda") for _ in drawn]

    assert failed == []
    assert len(drawn) > 40
    torch.testing.assert_close(torch.stack(drawn), torch.stack(expected), rtol=0, atol=0)


def test_what_draws_random_numbers_raises_where_it_was_said_not_to(beside: Beside) -> None:
    """And leaves the generator as it was: the next capture is told the truth."""
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13):
        pytest.skip("graphs have a state of their own")
    with pytest.raises(RuntimeError):
        beside.capture(lambda: torch.randn(4, device="cuda"))

    torch.cuda.manual_seed(7)
    first = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(7)
    captured = beside.recorder.capture(lambda _: [torch.randn(4, device="cuda")], [], may_draw=True)
    captured.discard(beside.recorder.driver)
    torch.testing.assert_close(torch.randn(4, device="cuda"), first, rtol=0, atol=0)


def test_a_signal_handler_may_use_the_gpu(beside: Beside) -> None:
    """As one that saves a checkpoint, in a job that is about to be preempted."""
    saved: list[float] = []

    def handler(*_: object) -> None:
        y = beside.x * 2
        torch.cuda.synchronize()
        saved.append(float(y.cpu().mean()))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        beside.capture(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert saved == [2]


def test_captures_in_several_threads_go_on_one_after_the_other(beside: Beside) -> None:
    """Beside threads that wait for the device all the time."""
    is_over, failed = threading.Event(), list[BaseException]()

    def waiting() -> None:
        try:
            while not is_over.is_set():
                torch.cuda.synchronize()
                time.sleep(0)
        except Exception as error:  # noqa: BLE001 - whatever it is
            failed.append(error)

    def capturing() -> None:
        try:
            for _ in range(10):
                beside.capture(lambda: time.sleep(0.001))
        except Exception as error:  # noqa: BLE001 - whatever it is
            failed.append(error)

    waits = [threading.Thread(target=waiting) for _ in range(2)]
    captures = [threading.Thread(target=capturing) for _ in range(2)]
    for each in (*waits, *captures):
        each.start()
    for each in captures:
        each.join()
    is_over.set()
    for each in waits:
        each.join()

    assert failed == []
