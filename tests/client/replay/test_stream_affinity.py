"""What is written at a fixed address before launches is in use on one stream at a time, and by one thread."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend.driver import Driver
from pygraphd.client.backend.errors import FallbackError
from pygraphd.client.recording.builder import build
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.false_pointers import CapturedCall
from pygraphd.client.replay.relocation_table import Span
from pygraphd.client.replay.rng import RngCursor
from pygraphd.client.replay.stream_affinity import StreamAffinity
from tests.support.generators import Default, Generator
from tests.support.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.replay.replay import Replay
    from tests.support.emulator import Allocator, Emulator

pytestmark = pytest.mark.torch


class Streams:
    """Streams by number, and which of them have nothing left to do."""

    def __init__(self) -> None:
        self.current = 0
        self.ended: set[int] = set()
        self.asked: list[int] = []

    def watch(self) -> Callable[[], bool]:
        stream = self.current

        def has_ended() -> bool:
            self.asked.append(stream)
            return stream in self.ended

        return has_ended

    def enter(self, affinity: StreamAffinity, stream: int) -> None:
        self.current = stream
        affinity.enter(stream)


def test_another_stream_may_follow_once_the_first_has_nothing_left_to_do(emulator: Emulator) -> None:
    streams = Streams()
    affinity = StreamAffinity(emulator.driver, streams.watch)
    for _ in range(3):
        streams.enter(affinity, 7)
    assert streams.asked == []  # on one stream nothing is asked

    for _ in range(2):
        with pytest.raises(FallbackError, match="another stream"):
            streams.enter(affinity, 8)
    streams.enter(affinity, 7)
    streams.ended.add(7)
    streams.enter(affinity, 8)
    with pytest.raises(FallbackError):
        streams.enter(affinity, 7)

    assert streams.asked == [7, 7, 7, 8]


@pytest.mark.parametrize("can_be_watched", [True, False])
def test_a_stream_that_cannot_be_asked_is_not_left(emulator: Emulator, can_be_watched: bool) -> None:
    def fail() -> Any:
        raise RuntimeError("an error of the user's kernel")

    affinity = StreamAffinity(emulator.driver, (lambda: fail) if can_be_watched else fail)
    affinity.enter(7)

    with pytest.raises(FallbackError):
        affinity.enter(8)


class Drawing:
    """Two recordings whose kernels read one generator's state where PyTorch keeps it: for all graphs of a generator."""

    def __init__(self, emulator: Emulator, allocator: Allocator) -> None:
        self.generator = Generator(42, 100)
        self.state = allocator.tensor(torch.zeros(128))
        affinity = StreamAffinity(emulator.driver, lambda: bool)
        self.replays = [self._recorded(Recorder(emulator, allocator), affinity) for _ in range(2)]

    def _recorded(self, recorder: Recorder, affinity: StreamAffinity) -> Replay:
        """Record a graph that returns the state as its kernel finds it."""
        out = recorder.arena.allocate(2)
        recorder.graph.copy(out, self.state[:2])
        held = (Span(self.state.data_ptr(), self.state.data_ptr() + 8),)
        cursor = self._cursor(recorder, affinity)
        spans = tuple(recorder.arena.allocations)
        capture = Capture(recorder.graph.handle, [out], spans, held, cursor=cursor)
        return build(recorder.emulator.driver, CapturedCall(capture, []), recorder.notes.append).replay

    def _cursor(self, recorder: Recorder, affinity: StreamAffinity) -> RngCursor:
        drawing = self

        class Graph:
            def replay(self) -> None:
                drawing.state[0] = drawing.generator.offset
                drawing.generator.offset += 4

            def reset(self) -> None:
                pass

        return RngCursor(Graph(), Default(self.generator), recorder.emulator.driver, lambda: None, affinity)

    def draw(self, which: int) -> int:
        (out,) = self.replays[which].serve([])[0]
        return int(out[0])


def test_two_threads_never_launch_with_each_others_state(
    emulator: Emulator, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    other = threading.Thread(target=lambda: drawn.append(drawing.draw(1)))
    launch = Driver.launch

    def launch_later(driver: Driver, executable: int, stream: int) -> None:
        if other.ident is None:
            other.start()  # the state is written, and this thread is held up before it launches
            other.join(0.2)
        launch(driver, executable, stream)

    monkeypatch.setattr(Driver, "launch", launch_later)
    drawing = Drawing(emulator, allocator)
    drawn.append(drawing.draw(0))
    other.join(10)

    assert sorted(drawn) == [100, 104]
    assert drawing.generator.offset == 108
    for replay in drawing.replays:
        replay.close()


def test_two_recordings_never_draw_on_two_streams(
    emulator: Emulator, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, private = [7], "pygraphd.client.backend.torch_private."
    monkeypatch.setattr(private + "current_stream", lambda _device: lambda: stream[0])

    def current_stream(_device: int, to: Any) -> int:
        to[0] = stream[0]
        return 0

    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))(
        current_stream
    )
    address = ctypes.cast(function, ctypes.c_void_p).value
    monkeypatch.setattr(private + "stream_function", lambda _device: (address, 0))
    drawing = Drawing(emulator, allocator)
    assert [drawing.draw(which) for which in (0, 1, 0)] == [100, 104, 108]

    stream[0] = 8
    with monkeypatch.context() as patch:
        for replay in drawing.replays:  # nothing is bound for a call that will not be launched
            patch.setattr(replay._device.ops, "bind", None)
        for which in (0, 1):
            with pytest.raises(FallbackError, match="another stream"):
                drawing.draw(which)

    assert drawing.generator.offset == 112
    stream[0] = 7
    assert drawing.draw(1) == 112
    for replay in drawing.replays:
        replay.close()
