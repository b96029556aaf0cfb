"""One attempt to record a call: it is captured, made a replay of, tried on copies of the inputs, and held against the launched call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import UnfitError
from pygraphd.client.recording import builder, stand_ins, verification
from pygraphd.client.recording.false_pointers import OTHERWISE, UNCLEAR
from pygraphd.client.recording.output_reserves import ROUNDS, ground_for, rooms_for
from pygraphd.client.recording.recorded_call import Call
from pygraphd.client.recording.refusals import Persistence, Refusal
from pygraphd.client.replay.node_params import OpaqueError, PassingError
from pygraphd.client.replay.replay import Replay
from pygraphd.client.replay.rng import Generators, generators_in
from pygraphd.client.replay.stream_affinity import OTHER_STREAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.recording.builder import Capture
    from pygraphd.client.recording.comparison import Disagreement
    from pygraphd.client.recording.layout_mismatch import LayoutConstraints
    from pygraphd.client.recording.output_reserves import Room
    from pygraphd.client.recording.recorded_call import Stood
    from pygraphd.client.recording.verification import Generator

NO_ROOM = "not enough free memory to verify a recording"
INTERRUPTED = "its capture was ended by another thread, as by one that waits for the whole device"
_SAYS_INTERRUPTED = "previous error during capture"
"""In what CUDA says when a capture has been ended, and not by a call of its own thread: then that call's error comes first."""
NEW_THREAD = "it could not be captured in a thread that had not run it before"
MAX_DISTURBED = 3
"""Recordings that are given up for one of these reasons, or since another stream draws random numbers, before that is taken to stay so."""


class Recorder(Protocol):
    """Captures on one device, and says of it what recording needs to know."""

    @property
    def driver(self) -> Driver:
        """The driver that its graphs belong to."""

    @property
    def device(self) -> torch.device:
        """Where they run."""

    @property
    def generator(self) -> Generator | None:
        """What kernels draw random numbers from."""

    def capture(
        self,
        launch: Runnable,
        inputs: list[Any],
        rooms: Sequence[Room] = (),
        *,
        ground: int = 0,
        is_shifted: bool = False,
    ) -> Capture:
        """Record one call; raises `OpaqueError`, `DriverError` or RuntimeError with nothing run and nothing left.

        If it `is_shifted`, what is allocated does not lie as it would otherwise, up to multiples of 4 GiB. Outputs with
        `rooms` lie in these. All is cut from a `ground` of so many bytes, if these can be had.
        """

    def room(self) -> int:
        """Return how many bytes could be allocated now."""

    def why_not(self) -> str | None:
        """Return why nothing can be captured now; `capture` raises `PassingError` for it."""

    def trim(self) -> None:
        """Give memory that is free back to the device."""

    def in_capture(self) -> bool:
        """Whether the current stream is being captured."""

    @property
    def conditions(self) -> tuple[tuple[Callable[[], object], object], ...]:
        """Functions and the values that they return where a call can be replayed: outside of captures, with its device current."""

    def on_device(self) -> contextlib.AbstractContextManager[object] | None:
        """Return what makes its device the current one; None if it is."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What making a recording came to: nodes, allocations of a call, and milliseconds on the host's clock."""

    nodes: int
    memories: int
    capture_ms: float
    """With tensors that stand in for the inputs."""
    build_ms: float
    """Reading and searching parameters, for which it may be captured once more, and instantiating."""
    trial_ms: float
    """Replaying on copies."""
    compare_ms: float = 0.0
    """Comparing, when the call has run; what the GPU still has to do of that call is waited for."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A recording that has run on copies of a call's inputs; `unseen` inputs show up in none of its nodes, so many are `staged`."""

    replay: Replay
    trial: verification.Trial
    unseen: frozenset[int]
    staged: int
    nodes: int

    def keep(self) -> Replay:
        """Return the replay, and give back all that was needed to find out."""
        if not self.trial.random:
            self.replay.forget_random_numbers()
        self.trial.close()
        return self.replay

    def close(self) -> None:
        """Give back everything."""
        self.replay.close()
        self.trial.close()


class Attempts:
    """Makes the recordings of one callable."""

    def __init__(self, launch: Runnable, recorder: Recorder, report: Report, facts: GraphFacts) -> None:
        """Record `launch`."""
        self._launch = launch
        self._recorder = recorder
        self._report = report
        self._facts = facts
        self.captures = 0
        """How often it was captured, or was to be."""
        self.costs: Costs | None = None
        """Of the latest recording."""
        self.of_recorder: set[str] = set()
        """What the recorder has said why it does not capture anything."""
        self._disturbed: Counter[str] = Counter()
        self._threads = threading.local()

    def note_launch(self) -> None:
        """Note that this thread has run the callable."""
        self._threads.has_launched = True

    def begin(
        self,
        inputs: list[Any],
        staged: frozenset[int],
        constraints: LayoutConstraints,
        *,
        is_doubted: bool = False,
    ) -> Attempt | Refusal:
        """Record a call, with buffers for the inputs that are `staged`, and replay it on copies of its inputs.

        If it `is_doubted`, as an earlier recording seemed to differ, inputs are kept for finding out how much it differs from itself.
        """
        try:
            with self._report.recording(), _collecting_later():
                return self._try(inputs, staged, constraints, is_doubted=is_doubted)
        except (PassingError, torch.OutOfMemoryError) as error:
            return Refusal(_first_line(error), Persistence.TRANSIENT)
        except OpaqueError as error:
            return Refusal(_first_line(error), Persistence.PERMANENT)
        except _OURS as error:
            return Refusal(_first_line(error), self._persistence(error))
        except Exception as error:  # noqa: BLE001 - nothing has run yet: the call can be launched as if nothing had been
            return Refusal(f"recording failed: {_first_line(error)}", Persistence.PROCESS)

    def end(self, attempt: Attempt, outputs: Sequence[Any]) -> Disagreement | Refusal | None:
        """Return why an attempt is not to be used, in view of what the callable has returned; None if it is."""
        began = time.perf_counter()
        try:
            with self._report.recording(), _collecting_later():
                found = attempt.trial.disagreement(outputs, self._launch)
        except Exception as error:  # noqa: BLE001 - the call has its result; what cannot be verified is not used
            is_short = isinstance(error, torch.OutOfMemoryError)
            persistence = Persistence.TRANSIENT if is_short else Persistence.PROCESS
            return Refusal(f"verification failed: {_first_line(error)}", persistence)
        if self.costs is not None:
            self.costs = dataclasses.replace(self.costs, compare_ms=(time.perf_counter() - began) * 1e3)
        return found

    def _persistence(self, error: Exception) -> Persistence:
        # Which stream a call is on, or what others do, is no matter of its sizes; but a capture is much to pay for it each time.
        reason = str(error)
        if reason in {OTHER_STREAM, INTERRUPTED, NEW_THREAD, UNCLEAR, OTHERWISE}:
            self._disturbed[reason] += 1
            return Persistence.ONE_CALL if self._disturbed[reason] <= MAX_DISTURBED else Persistence.PROCESS
        return Persistence.PROCESS

    def _try(
        self, inputs: list[Any], to_stage: frozenset[int], constraints: LayoutConstraints, *, is_doubted: bool
    ) -> Attempt:
        if reason := _why_not_bind(inputs, self._recorder.device, self._facts):
            raise OpaqueError(reason)
        moving = builder.input_groups(inputs, ())
        copies = stand_ins.bytes_to_copy(inputs, moving)
        self._make_sure_of(max(copies, stand_ins.bytes_to_stand_in(inputs, constraints, moving)))
        staged = {index: _buffer_for(inputs[index]) for index in sorted(to_stage)}
        call = Call(inputs, staged, constraints, moving)
        times = [time.perf_counter()]
        stood, capture = self._capture(call)
        times.append(time.perf_counter())
        built = builder.build(
            self._recorder.driver,
            capture,
            stood.bound,
            staged,
            self._report.fail,
            functools.partial(self._capture_again, call, capture),
            self._facts
            if not torch_private.saves_by_hooks()
            else dataclasses.replace(self._facts, saved=frozenset()),
        )
        times.append(time.perf_counter())
        try:
            trial = self._trial(built, capture, stood, call, is_doubted=is_doubted)
            times.append(time.perf_counter())
        except BaseException:
            built.replay.close()
            capture.let_go()
            raise
        capture.let_go()
        self.costs = _costs(built, times)
        return Attempt(built.replay, trial, built.unseen, len(staged), built.nodes)

    def _trial(
        self, built: builder.Built, capture: Capture, stood: Stood, call: Call, *, is_doubted: bool
    ) -> verification.Trial:
        replay, undefined = built.replay, self._facts.undefined
        copies = stand_ins.bytes_to_copy(call.inputs, call.moving)
        # The launched call will need as much again, and must get it.
        self._make_sure_of(
            (4 if is_doubted else 1) * copies
            + (3 if is_doubted else 2) * sum(memory.bytes for memory in replay.memories)
        )
        return verification.Trial(
            replay,
            call.inputs,
            self._generator_of(call),
            [*stood.places, *capture.places(built.device)],
            undefined,
            stood.stand_ins,
            call.moving,
            keeps_inputs=is_doubted and self._facts.is_repeatable,
        )

    def _generator_of(self, call: Call) -> Generator | None:
        """Return what a call draws random numbers from: the device's generator, and those that it is given."""
        own, given = self._recorder.generator, generators_in(call.inputs).values()
        return Generators((cast("Any", own), *given)) if own is not None and given else own

    def _make_sure_of(self, size: int) -> None:
        """Raise PassingError if so many bytes cannot be had."""
        if size > self._recorder.room():
            raise PassingError(NO_ROOM)

    # --- capturing ---

    def _capture(self, call: Call) -> tuple[Stood, Capture]:
        self.captures += 1
        try:
            return self._capture_apart(call.stood())
        except PassingError:
            self.captures -= 1  # nothing was
            raise

    def _capture_apart(self, stood: Stood) -> tuple[Stood, Capture]:
        """Capture a call as often as it takes to have each output's storage lie apart."""
        capture = self._capture_on(stood)
        for done in range(1, ROUNDS):
            try:
                rooms = rooms_for(capture, for_all=done == ROUNDS - 1)
            except BaseException:
                capture.discard(self._recorder.driver)
                raise
            if rooms == capture.rooms:
                break
            ground = ground_for(capture)
            capture.discard(self._recorder.driver)
            capture = self._capture_on(stood, rooms, ground)
        return stood, capture

    def _capture_again(self, call: Call, first: Capture, beside: int) -> builder.Second:
        """Capture a call once more, beside so many captures of it, which have allocated as much each as the first."""
        # What is free in the pools of these counts as room, and is none for another.
        self._make_sure_of(call.bytes_to_stand_in + (1 + beside) * first.bytes)
        try:
            stood = call.stood(together=True)
            capture = self._capture_on(stood, first.rooms, first.ground, is_shifted=True)
        except PassingError:
            raise
        except OpaqueError as error:
            # It has been captured just now, but may not be so where inputs share a storage.
            raise UnfitError(OTHERWISE) from error
        return builder.Second(capture, stood.bound, stood.places)

    def _capture_on(
        self, stood: Stood, rooms: Sequence[Room] = (), ground: int = 0, *, is_shifted: bool = False
    ) -> Capture:
        inputs = list(stood.bound)
        try:
            return self._recorder.capture(self._launch, inputs, rooms, ground=ground, is_shifted=is_shifted)
        except PassingError as error:
            self.of_recorder.add(_first_line(error))
            raise
        except _OURS:
            raise
        except Exception as error:
            if _SAYS_INTERRUPTED in str(error):
                raise UnfitError(INTERRUPTED) from error
            if not hasattr(self._threads, "has_launched"):
                # What a library makes at its first call in a thread, as a handle, it cannot make within a capture.
                raise UnfitError(NEW_THREAD) from error
            # Whatever the callable may raise, it raises because it is being captured: it has run on these inputs' kind before.
            raise OpaqueError(f"it cannot be captured: {_first_line(error)}") from error


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Keep Python's garbage collector from running meanwhile.

    Of the thousands of objects made here few are garbage, and a full collection in a process that has compiled a model takes a
    quarter of a second. What it would free might be memory of other streams, too, which a capture must not see.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _buffer_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory with a tensor's layout and values that can be written at any later call."""
    with torch.inference_mode(False):
        buffer = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return torch_private.viewed_like(buffer, tensor).copy_(tensor.detach())


def _costs(built: builder.Built, times: Sequence[float]) -> Costs:
    capture_ms, build_ms, trial_ms = ((end - begin) * 1e3 for begin, end in itertools.pairwise(times))
    return Costs(built.nodes, len(built.replay.memories), capture_ms, build_ms, trial_ms)


_OURS = (OpaqueError, UnfitError, DriverError, torch.OutOfMemoryError)
"""What may go wrong before the callable has run."""


def _why_not_bind(inputs: Sequence[Any], device: torch.device, facts: GraphFacts) -> str | None:
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Generator):
            if value.device != device:
                return f"input {index} is a Generator of another device"
            if not facts.is_repeatable:
                # It may not be capturable, and up to torch 2.12 a capture that fails leaves a generator as if it still were captured.
                return f"input {index} is a Generator, and it holds a custom operator"
        elif value is not None and not isinstance(value, torch.Tensor | int):
            return f"input {index} is a {type(value).__name__}"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
