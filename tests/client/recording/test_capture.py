"""What can be said of a capture without a GPU: which allocations it made, and which of them somebody holds."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import time
from ctypes import byref, c_int
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.allocator_counts import AllocatorCounts
from pygraphd.client.backend.driver import _CAPTURE_MODE_RELAXED
from pygraphd.client.backend.errors import TransientError
from pygraphd.client.backend.workspaces import workspaces
from pygraphd.client.recording import capture, device_waits
from pygraphd.client.recording.capture import BUSY, HISTORY, CudaRecorder
from pygraphd.client.recording.capture_pool import CapturePool
from pygraphd.client.recording.device_waits import DeviceWaits
from pygraphd.client.recording.lifetimes import held, lifetimes
from pygraphd.client.recording.output_reserves import OutputReserves
from pygraphd.client.replay.relocation_table import BLOCK, Span
from pygraphd.client.replay.stream_affinity import StreamAffinity
from tests.support.allocator_stats import nested
from tests.support.idle_device import IdleDevice
from tests.support.stepped_clock import SteppedClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.emulator import Emulator

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def test_allocations_are_told_from_what_is_alive_in_the_end() -> None:
    events = [
        ("segment_alloc", 0, 4096),
        ("alloc", 0, 100),
        ("alloc", 512, 8),
        ("free_requested", 0, 100),
        ("free_completed", 0, 100),
        ("alloc", 0, 300),
        ("alloc", 1024, 8),
        ("free_requested", 1024, 8),
    ]

    allocations, alive, temporary = lifetimes(events)

    assert allocations == (Span(0, 100), Span(512, 520), Span(0, 300), Span(1024, 1032))
    assert set(alive) == {Span(512, 520), Span(0, 300)}
    assert temporary == BLOCK  # those of 100 and 8 bytes are never there together


def test_what_is_alive_and_returned_is_held_by_nobody_else() -> None:
    output, other = torch.zeros(8), torch.zeros(8)
    alive = [Span(each.data_ptr(), each.data_ptr() + 32) for each in (output, other)]

    assert held(alive, [None, output[4:], torch.empty(0)]) == (alive[1],)


def recorder(monkeypatch: pytest.MonkeyPatch, why_not: str | None) -> CudaRecorder:
    """Return a recorder of a device that there is not, as far as it does without."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(CudaRecorder, "_why_not", lambda _: why_not)
    made = CudaRecorder.__new__(CudaRecorder)
    made.device, made._most_reserved = torch.device("cpu"), 0
    made._waits = IdleDevice()
    return made


def test_what_is_no_matter_of_the_graph_is_told_as_passing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransientError, match="history"):
        recorder(monkeypatch, HISTORY).capture(list, [])


def test_a_history_that_is_recorded_is_not_disturbed_by_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 tells by an allocation whether its allocator keeps memory, which may fail where the device is full."""
    allocated = []

    def full(*_: Any, **__: Any) -> None:
        allocated.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", raising=False)
    monkeypatch.setattr("pygraphd.client.backend.torch_private.capture._allocations", lambda _: 0)
    monkeypatch.setattr(torch, "empty", full)
    made = CudaRecorder.__new__(CudaRecorder)
    made.device = torch.device("cpu")
    for is_recorded in (True, False):
        monkeypatch.setattr(torch_private, "history_is_recorded", lambda found=is_recorded: found)
        assert made.why_not() == (HISTORY if is_recorded else None)
        assert len(allocated) == (not is_recorded)


@pytest.mark.parametrize("why_not", [None, HISTORY])
def test_who_asks_why_nothing_is_captured_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, why_not: str | None
) -> None:
    """Neither for another thread's capture, nor for one that has called what asks."""
    made, answers = recorder(monkeypatch, why_not), list[str | None]()
    assert made.why_not() == why_not

    with capture._one_at_a_time:
        thread = threading.Thread(target=lambda: answers.append(made.why_not()), daemon=True)
        thread.start()
        thread.join(5)

    assert answers == [BUSY]


@pytest.mark.parametrize(
    ("free", "why_not", "emptied"),
    [(capture.MAX_CACHED_BYTES + 1, None, 1), (capture.MAX_CACHED_BYTES, None, 0), (1 << 30, HISTORY, 0)],
)
def test_much_free_memory_is_given_back_before_a_capture(
    monkeypatch: pytest.MonkeyPatch, emulator: Emulator, free: int, why_not: str | None, emptied: int
) -> None:
    """Without a harm to other threads that capture meanwhile; see `Driver.relaxed`."""
    modes: list[int] = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: nested(100 + free, 100))
    monkeypatch.setattr(workspaces, "empty_cache", lambda: modes.append(capture_mode(emulator)))
    made = recorder(monkeypatch, why_not)
    made.driver = emulator.driver

    made.empty_cache()

    assert modes == [_CAPTURE_MODE_RELAXED] * emptied
    assert capture_mode(emulator) != _CAPTURE_MODE_RELAXED


def test_memory_is_given_back_without_harm_to_captures_of_other_threads(
    monkeypatch: pytest.MonkeyPatch, emulator: Emulator
) -> None:
    modes: list[int] = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: nested(7, 7))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch_private, "release_pool", lambda *_: None)
    monkeypatch.setattr(workspaces, "clear", lambda: None)
    monkeypatch.setattr(workspaces, "empty_cache", lambda: modes.append(capture_mode(emulator)))
    made = recorder(monkeypatch, None)
    made.driver = emulator.driver
    pool = CapturePool(emulator.driver, 0, lambda *_: contextlib.nullcontext())

    made.trim()
    with pool.capturing(cast("torch.cuda.CUDAGraph", None)):
        pass
    pool.release()

    assert modes == [_CAPTURE_MODE_RELAXED] * 2
    assert made._most_reserved == 7


def capture_mode(emulator: Emulator) -> int:
    """Return the capture mode of this thread: the driver tells it where it is exchanged."""
    mode = c_int(0)
    emulator.driver._call("cuThreadExchangeStreamCaptureMode", byref(mode))
    found = mode.value
    emulator.driver._call("cuThreadExchangeStreamCaptureMode", byref(mode))
    return found


class Stream:
    """The stream of a capture; what was asked of it."""

    cuda_stream = 9

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def is_held(affinity: StreamAffinity) -> bool:
    """Return whether another thread would have to wait for the lock."""
    found: list[bool] = []

    def ask() -> None:
        found.append(not affinity.lock.acquire(blocking=False))
        if not found[0]:
            affinity.lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_a_capture_at_whose_end_a_handler_raises_is_discarded(
    monkeypatch: pytest.MonkeyPatch, emulator: Emulator
) -> None:
    """It is done when the handler runs, and nobody has it."""
    made, discarded = recorder(monkeypatch, None), list[object]()
    made.driver, made._threads = emulator.driver, threading.local()
    made._threads.handle = 1

    class Captured:
        def discard(self, driver: object) -> None:
            discarded.append(driver)

    def capture_and_strike(*_: object, **__: object) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return Captured()

    def fail(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(made, "_capture", capture_and_strike)
    before = signal.signal(signal.SIGUSR1, fail)
    try:
        with pytest.raises(TimeoutError):
            made.capture(list, [])
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert discarded == [emulator.driver]


@pytest.mark.parametrize("shares", [True, False])
def test_nobody_launches_what_reads_the_state_that_a_capture_shares_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, emulator: Emulator, shares: bool
) -> None:
    """As in torch before 2.13; later, what others draw is no matter of a capture. They wait for the lock, and may use any stream then."""
    made, seen = recorder(monkeypatch, None), list[bool]()
    made.driver, made._shares_state, stream = emulator.driver, shares, Stream()
    made._random_numbers = StreamAffinity(emulator.driver, lambda: bool)
    made.__dict__["_stream"] = stream
    made._random_numbers.enter(7)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append(is_held(made._random_numbers)))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(capture, "_workspaces_in_capture", contextlib.nullcontext)

    class Pool:
        @contextlib.contextmanager
        def capturing(self, _: object) -> Iterator[None]:
            seen.append(is_held(made._random_numbers))
            made._random_numbers.expect(8)
            yield

    pool: Any = Pool()
    assert made._run(None, pool, lambda inputs: [1], [], OutputReserves((), CPU)) == [1]

    assert seen == [shares, shares]
    assert stream.waits == 1
    made._random_numbers.enter(8)
    assert made._affinity() is not made._affinity() or shares


def test_a_shifted_capture_takes_memory_before_what_it_captures_does_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, emulator: Emulator
) -> None:
    """Of either kind: what the allocator has more than 1 MiB for it takes elsewhere. What is taken is none of the capture's."""
    made, seen, taken = recorder(monkeypatch, None), list[str](), dict[int, int]()
    made.driver, made._shares_state = emulator.driver, False
    made._random_numbers = StreamAffinity(emulator.driver, lambda: bool)
    made.__dict__["_stream"] = Stream()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(capture, "_workspaces_in_capture", contextlib.nullcontext)

    def storage(size: int, **_: Any) -> Taken:
        return Taken(size, taken)

    class Pool:
        @contextlib.contextmanager
        def capturing(self, _: object) -> Iterator[None]:
            seen.append("begun")
            monkeypatch.setattr(torch, "UntypedStorage", storage)
            yield
            monkeypatch.undo()
            seen.append("ended")

    def run_kernels(_: list[Any]) -> list[Any]:
        seen.append(f"run beside {sorted(taken)}")
        return []

    pool: Any = Pool()
    reserves = OutputReserves((), CPU, capture.SHIFTS)
    made._run(None, pool, run_kernels, [], reserves)

    assert capture.SHIFTS[0] <= 1 << 20 < capture.SHIFTS[1]
    assert seen == ["begun", f"run beside {sorted(capture.SHIFTS)}", "ended"]
    assert (taken, reserves.before) == ({}, len(capture.SHIFTS))


class Taken:
    """Memory: as long as it is there, so many bytes are taken."""

    def __init__(self, size: int, taken: dict[int, int]) -> None:
        self._size, self._taken = size, taken
        taken[size] = size

    def __del__(self) -> None:
        del self._taken[self._size]


@pytest.mark.parametrize(
    ("used", "reserved", "setting", "addresses"),
    [
        (64 << 20, 0, "", 128 << 20),
        ((64 << 20) - 1, 0, "", 0),
        (64 << 20, 64 << 20, "", 128 << 20),
        (1 << 20, 200 << 20, "", 200 << 20),
        (1 << 20, 100 << 20, "", 0),
        (64 << 20, 64 << 20, "backend:native,expandable_segments:True", 0),
    ],
    ids=["allocated", "too few", "both", "peak set back", "too few reserved", "no pools"],
)
def test_large_programs_get_addresses_where_the_allocator_can_hand_them_out(
    monkeypatch: pytest.MonkeyPatch,
    emulator: Emulator,
    used: int,
    reserved: int,
    setting: str,
    addresses: int,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    made = recorder(monkeypatch, None)
    made.driver = emulator.driver
    for each in (reserved, 0):
        counts = nested(each, used)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _, counts=counts: counts)
        made.empty_cache()

    assert made.addresses_for_capture() == addresses


class Event:
    """An event that is done after some questions."""

    def __init__(self, questions: float) -> None:
        self.questions = questions

    def query(self) -> bool:
        self.questions -= 1
        return self.questions < 0


@pytest.mark.parametrize(
    ("ranks", "questions", "ends", "may_wait"),
    [(ranks, *each) for ranks in (False, True) for each in ((3, True, True), (3, False, False), (math.inf, True, False))],
    ids=[f"{who}: {what}" for who in ("alone", "ranks") for what in ("backlog", "another stream waits", "the stream waits")],
)  # fmt: skip
def test_memory_is_not_given_back_while_the_gpu_may_wait_for_another_rank_or_the_host(
    monkeypatch: pytest.MonkeyPatch,
    emulator: Emulator,
    ranks: bool,
    questions: float,
    ends: bool,
    may_wait: bool,
) -> None:
    over, emptied = threading.Event(), list[bool]()
    if ends:
        over.set()
    made = recorder(monkeypatch, None)
    made.driver, made.in_capture = emulator.driver, bool
    made._waits = DeviceWaits(made, threading.RLock())
    counts = AllocatorCounts(0, 1 << 30, 0, 0, 0)
    monkeypatch.setattr(device_waits, "has_other_ranks", lambda: ranks)
    limits = ("BACKLOG_S", "OTHER_STREAMS_S", "ALONE_S")
    for limit in limits:  # nothing takes as long on the slowest of machines, or as short where it never ends
        monkeypatch.setattr(device_waits, limit, 60.0 if may_wait else 0.01)
    monkeypatch.setattr(device_waits, "WAITS_S", 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: over.wait())
    monkeypatch.setattr(CudaRecorder, "mark", lambda _: Event(questions))
    monkeypatch.setattr(CudaRecorder, "_counts", counts)
    monkeypatch.setattr(CudaRecorder, "_empty_cache", lambda _: emptied.append(True))
    monkeypatch.setattr(workspaces, "clear", lambda: None)
    try:
        assert made.may_wait() is may_wait
        made.empty_cache()
        made.trim()
        assert len(emptied) == 2 * may_wait
        made.in_capture = lambda: True
        assert not made.may_wait()
        made.in_capture = bool
        assert made.may_wait() is may_wait  # a capture of the program's own says nothing of later calls
        monkeypatch.setattr(device_waits, "WAITS_S", math.inf)
        for limit in limits:
            monkeypatch.setattr(device_waits, limit, 0.01)
        over.clear()
        assert not made.may_wait()
        over.set()
        assert not made.may_wait()  # it is not asked again so soon
    finally:
        over.set()


def test_a_gpu_that_goes_on_to_wait_is_asked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, is_idle = SteppedClock(), list[float](), False

    def ask(_: float) -> bool:
        asked.append(clock.now())
        return is_idle

    def each_second(seconds: int) -> None:
        for _ in range(seconds):
            clock.sleep(1.0)
            waits.may_wait()

    asking: Any = SimpleNamespace(
        beside_captures=contextlib.nullcontext, in_capture=bool, mark=lambda: Event(0), is_idle_within=ask
    )
    monkeypatch.setattr(time, "monotonic", clock.now)
    waits = DeviceWaits(asking, threading.RLock())
    each_second(1200)
    assert [later - earlier for earlier, later in itertools.pairwise(asked)] == [
        5,
        10,
        20,
        40,
        80,
        160,
        320,
        320,
    ]

    clock.sleep(320.0)
    is_idle = True
    assert waits.may_wait()
    is_idle = False
    asked.clear()
    each_second(8)
    assert len(asked) == 2  # as at first
