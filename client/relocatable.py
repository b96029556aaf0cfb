"""A compiled callable that runs as relocatable graphs: what is recorded, verified, kept, bounded, and when it is launched.

There is one recording for each set of integer inputs (dynamic sizes) that comes back. Whatever cannot be recorded or does not
fit a call is launched, and counted with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client import recording, recycling, verification
from pygraphd.client.binding import UnfitError
from pygraphd.client.driver import DriverError
from pygraphd.client.output_facts import OutputFacts
from pygraphd.client.parameters import OpaqueError
from pygraphd.client.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.client._torch import Runnable
    from pygraphd.client.driver import Driver
    from pygraphd.client.recording import Capture
    from pygraphd.client.recycling import Link
    from pygraphd.client.report import Report
    from pygraphd.client.verification import Generator

MAX_RECORDINGS = 8
"""Recordings of one callable, if nobody says otherwise; the one that was not used for longest goes first."""
CAPTURES_OF_EACH = 4
"""Times that bound is how often a callable is captured in all: sizes that take turns must not be recorded for ever."""
MAX_CAPTURES = CAPTURES_OF_EACH * MAX_RECORDINGS
IDLE_CHANGES = 16
"""Changes of size after which a recording that was not used gives back the memory that it keeps."""
MAX_SIZES = 64
"""Sets of integer inputs that are remembered, whether or not they were recorded; others are launched."""

NOT_YET = "sizes that had not come back yet"
TOO_MANY_SIZES = "more sizes than are remembered"
TOO_MANY_CAPTURES = "recorded too often"
IN_A_CAPTURE = "called within a capture of the user's"
BEING_RECORDED = "called from another thread while it was recorded"
NO_ROOM = "not enough free memory to verify a recording"
NO_MEMORY = "out of memory in a replay"


class Recorder(Protocol):
    """Captures on one device, and says of it what recording needs to know."""

    @property
    def driver(self) -> Driver:
        """The driver that its graphs belong to."""

    @property
    def generator(self) -> Generator | None:
        """What kernels draw random numbers from."""

    def capture(self, launch: Runnable, inputs: list[Any]) -> Capture:
        """Record one call; raises `OpaqueError`, `DriverError` or RuntimeError with nothing run and nothing left."""

    def room(self) -> int:
        """Return how many bytes could be allocated now."""

    def trim(self) -> None:
        """Give memory that is free back to the device."""

    def in_capture(self) -> bool:
        """Whether the current stream is being captured."""

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
    """Reading and searching parameters, and instantiating."""
    trial_ms: float
    """Replaying on copies."""
    compare_ms: float = 0.0
    """Comparing, when the call has run; what the GPU still has to do of that call is waited for."""


class Relocatable:
    """Runs a compiled callable as relocatable graphs where it can; call it with Inductor's list of inputs."""

    def __init__(
        self,
        launch: Runnable,
        recorder: Recorder,
        report: Report,
        link: Link | None = None,
        outputs: OutputFacts = OutputFacts(),  # noqa: B008 - it is frozen
        max_recordings: int = MAX_RECORDINGS,
    ) -> None:
        """Run `launch` so; `link` is for a forward whose backward is compiled, too, and for nothing else."""
        self._max_recordings = max_recordings
        self._launch = launch
        self._link = link
        self._outputs = outputs
        self._recorder = recorder
        self._report = report
        self._replays: dict[tuple[int, ...], Replay] = {}
        self._refused: dict[tuple[int, ...], str] = {}
        self._passing: set[str] = set()
        """Of these reasons, those that may be gone in the next process."""
        self._hidden: dict[tuple[int, ...], frozenset[int]] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._latest: tuple[int, ...] | None = None
        self._changes = 0
        self._used: dict[tuple[int, ...], int] = {}
        self._captures = 0
        self.costs: Costs | None = None
        """Of the latest recording."""
        self._integers: list[int] | None = None  # which inputs are integers is the same at every call
        self._recording = threading.Lock()
        self._changing = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        on_device = self._recorder.on_device()
        if on_device is None:
            return self._run(inputs)
        with on_device:
            return self._run(inputs)

    def _run(self, inputs: list[Any]) -> Any:
        if self._integers is None:
            self._integers = [index for index, value in enumerate(inputs) if type(value) is int]
        sizes = tuple([inputs[index] for index in self._integers])
        replay = self._replays.get(sizes)
        if replay is None:
            return self._without_replay(sizes, inputs)
        if self._recorder.in_capture():
            return self._step_aside(IN_A_CAPTURE, inputs)
        reason = None
        try:
            outputs = replay(inputs)
        except UnfitError as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            recycling.release_all()
            reason = NO_MEMORY
        except DriverError as error:
            reason = self._for_now(str(error))
            self._drop(sizes, reason)
        if reason is not None:
            # Not within `except`: the error's traceback keeps what was allocated for the replay.
            return self._step_aside(reason, inputs)
        if sizes != self._latest:
            self._note_use(sizes)
        if self._link is not None and not replay.recycles:
            self._link.replayed(replay, outputs)
        return outputs

    @property
    def refusal(self) -> str | None:
        """Why no call so far could be recorded; None if one could, or none was tried."""
        return next(iter(self._refused.values()), None) if not self._replays else None

    @property
    def refused_for_good(self) -> bool:
        """Whether that lies in the graph itself, and will be so in the next process."""
        return self.refusal is not None and self.lies_in_the_graph(self.refusal)

    @property
    def prepared(self) -> int:
        """How many recordings and executables were made: a call that has changed it has done what later calls need not do."""
        return self._captures + sum(replay.made for replay in list(self._replays.values()))

    def at(self, sizes: tuple[int, ...]) -> OfSizes:
        """Return what this is for one set of integer inputs; closing it lets go of their recording alone."""
        return OfSizes(self, sizes)

    def refusal_at(self, sizes: tuple[int, ...]) -> str | None:
        """Return why these sizes could not be recorded, or will not be; None if they are, or may be."""
        if sizes in self._replays:
            return None
        return self._refused.get(sizes) or self._why_no_more(sizes)

    def lies_in_the_graph(self, refusal: str) -> bool:
        """Whether what was refused for this reason will be so in the next process, too."""
        return refusal not in self._passing | {TOO_MANY_SIZES, TOO_MANY_CAPTURES}

    def let_go_at(self, sizes: tuple[int, ...]) -> None:
        """Let go of the recording for some sizes, if there is one, and of having seen them."""
        self._drop(sizes, None)
        self._seen.discard(sizes)

    @property
    def recordings(self) -> int:
        """How many recordings there are."""
        return len(self._replays)

    def close(self) -> None:
        """Let go of all recordings."""
        while self._replays:
            _, replay = self._replays.popitem()
            replay.close()

    # --- launching instead ---

    def _step_aside(self, reason: str, inputs: list[Any]) -> Any:
        self._report.step_aside(reason)
        return self._launch(inputs)

    def _without_replay(self, sizes: tuple[int, ...], inputs: list[Any]) -> Any:
        reason = self._why_not_record(sizes)
        if reason is not None:
            return self._step_aside(reason, inputs)
        if not self._recording.acquire(blocking=False):
            return self._step_aside(BEING_RECORDED, inputs)
        try:
            return self._record(sizes, inputs)
        finally:
            self._recording.release()

    def _why_not_record(self, sizes: tuple[int, ...]) -> str | None:
        if sizes in self._refused:
            return self._refused[sizes]
        if reason := self._why_no_more(sizes):
            return reason
        if sizes not in self._seen:
            self._seen.add(sizes)
            return NOT_YET
        return IN_A_CAPTURE if self._recorder.in_capture() else None

    def _why_no_more(self, sizes: tuple[int, ...]) -> str | None:
        if sizes not in self._seen and len(self._seen) >= max(
            MAX_SIZES, CAPTURES_OF_EACH * self._max_recordings
        ):
            return TOO_MANY_SIZES
        used_up = self._captures >= CAPTURES_OF_EACH * self._max_recordings
        return TOO_MANY_CAPTURES if used_up else None

    # --- recording ---

    def _record(self, sizes: tuple[int, ...], inputs: list[Any]) -> Any:
        attempt, reason = self._attempt(sizes, inputs)
        if attempt is None:
            self._refused[sizes] = reason
            return self._step_aside(reason, inputs)
        # The launched call is to take what recording had, and not more of the device beside it.
        self._trim()
        try:
            outputs = self._launch(inputs)
        except BaseException:
            attempt.close()
            raise  # the user's own, as without us
        disagreement = self._disagreement(attempt, outputs)
        if disagreement is None:
            self._keep(sizes, attempt)
            return outputs
        attempt.close()
        self._report.step_aside(disagreement)
        if attempt.unseen:
            # One of them is used after all: the next call is recorded with buffers for them.
            self._hidden[sizes] = attempt.unseen
        else:
            self._refused[sizes] = disagreement
        return outputs

    def _attempt(self, sizes: tuple[int, ...], inputs: list[Any]) -> tuple[_Attempt | None, str]:
        """Record a call and replay it on copies of its inputs; None and the reason if that cannot be done."""
        try:
            with _collecting_later():
                return self._try(inputs, self._hidden.get(sizes, frozenset())), ""
        except OpaqueError as error:
            reason = _first_line(error)
            return None, self._for_now(reason) if reason == NO_ROOM else reason
        except _OURS as error:
            return None, self._for_now(_first_line(error))
        except Exception as error:  # noqa: BLE001 - nothing has run yet: the call can be launched as if nothing had been
            return None, self._for_now(f"recording failed: {_first_line(error)}")

    def _disagreement(self, attempt: _Attempt, outputs: Sequence[Any]) -> str | None:
        began = time.perf_counter()
        with _collecting_later():
            disagreement = attempt.disagreement(outputs)
        if self.costs is not None:
            self.costs = dataclasses.replace(self.costs, compare_ms=(time.perf_counter() - began) * 1e3)
        return disagreement

    def _for_now(self, reason: str) -> str:
        self._passing.add(reason)
        return reason

    def _try(self, inputs: list[Any], hidden: frozenset[int]) -> _Attempt:
        if reason := _why_not_bind(inputs):
            raise OpaqueError(reason)
        copies = verification.bytes_to_copy(inputs)
        self._make_sure_of(copies)
        staged = {index: _buffer_for(inputs[index]) for index in sorted(hidden)}
        times = [time.perf_counter()]
        stand_ins, places = verification.stand_ins_for(inputs)
        bound = [staged.get(index, value) for index, value in enumerate(stand_ins)]
        capture = self._capture(bound)
        times.append(time.perf_counter())
        built = recording.build(
            self._recorder.driver, capture, bound, staged, self._report.fail, self._outputs.gradients
        )
        times.append(time.perf_counter())
        try:
            # The launched call will need as much again, and must get it.
            self._make_sure_of(copies + 2 * sum(memory.bytes for memory in built.replay.memories))
            old = [*places, *capture.places(built.device)]
            trial = verification.Trial(
                built.replay, inputs, self._recorder.generator, old, self._outputs.undefined
            )
            times.append(time.perf_counter())
        except BaseException:
            built.replay.close()
            capture.let_go()
            raise
        capture.let_go()
        self._report.count(staged=len(staged))
        self.costs = _costs(built, times)
        return _Attempt(built.replay, trial, built.unseen)

    def _make_sure_of(self, size: int) -> None:
        """Raise OpaqueError if so many bytes cannot be had."""
        if size > self._recorder.room():
            recycling.release_all()
            if size > self._recorder.room():
                raise OpaqueError(NO_ROOM)

    def _capture(self, bound: Sequence[Any]) -> Capture:
        self._captures += 1
        try:
            return self._recorder.capture(self._launch, list(bound))
        except _OURS:
            raise
        except Exception as error:
            # Whatever the callable may raise, it raises because it is being captured: it has run on these inputs' kind before.
            raise OpaqueError(f"it cannot be captured: {_first_line(error)}") from error

    def _keep(self, sizes: tuple[int, ...], attempt: _Attempt) -> None:
        replay = attempt.keep()
        with self._changing:
            before = self._replays.pop(sizes, None)
            self._replays[sizes] = replay
            self._latest = sizes
        self._trim()
        if self._link is not None:
            self._link.arm(replay)
        self._report.count(captured=1)
        if before is not None:
            before.close()
        if len(self._replays) > self._max_recordings:
            self._drop(next(iter(self._replays)), None)

    def _trim(self) -> None:
        try:
            self._recorder.trim()
        except Exception as error:  # noqa: BLE001 - one of CUDA's, which is the user's to meet in a call of theirs
            self._report.fail(f"giving memory back: {type(error).__name__}")

    def _drop(self, sizes: tuple[int, ...], reason: str | None) -> None:
        with self._changing:
            replay = self._replays.pop(sizes, None)
            self._used.pop(sizes, None)
        if reason is not None:
            self._refused[sizes] = reason
        if replay is not None:
            replay.close()

    def _note_use(self, sizes: tuple[int, ...]) -> None:
        with self._changing:
            replay = self._replays.pop(sizes, None)
            if replay is not None:
                self._replays[sizes] = replay
            self._latest = sizes
            self._changes += 1
            self._used[sizes] = self._changes
            idle = [each for each in self._replays if self._used.get(each, 0) <= self._changes - IDLE_CHANGES]
        for each in idle:
            if (replay := self._replays.get(each)) is not None:
                replay.release()


@dataclass(frozen=True, slots=True)
class OfSizes:
    """A `Relocatable` as those see it who call it with one set of integer inputs only."""

    whole: Relocatable
    sizes: tuple[int, ...]

    def __call__(self, inputs: list[Any]) -> Any:
        """Run on Inductor's list of inputs."""
        return self.whole(inputs)

    @property
    def refusal(self) -> str | None:
        """Why these sizes could not be recorded."""
        return self.whole.refusal_at(self.sizes)

    @property
    def refused_for_good(self) -> bool:
        """Whether that lies in the graph itself, and will be so in the next process."""
        return self.refusal is not None and self.whole.lies_in_the_graph(self.refusal)

    @property
    def prepared(self) -> int:
        """How many recordings and executables were made, for whichever sizes."""
        return self.whole.prepared

    def at(self, sizes: tuple[int, ...]) -> OfSizes:
        """Return the same for other sizes."""
        return OfSizes(self.whole, sizes)

    def close(self) -> None:
        """Let go of their recording."""
        self.whole.let_go_at(self.sizes)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A recording that has run on copies of a call's inputs; `unseen` inputs show up in none of its nodes."""

    replay: Replay
    trial: verification.Trial
    unseen: frozenset[int]

    def disagreement(self, outputs: Sequence[Any]) -> str | None:
        """Return why it is not to be used, in view of what the callable has returned."""
        try:
            return self.trial.disagreement(outputs)
        except Exception as error:  # noqa: BLE001 - the call has its result; what cannot be verified is not used
            return f"verification failed: {_first_line(error)}"

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
        return buffer.copy_(tensor.detach())


def _costs(built: recording.Built, times: Sequence[float]) -> Costs:
    capture_ms, build_ms, trial_ms = ((end - begin) * 1e3 for begin, end in itertools.pairwise(times))
    return Costs(built.nodes, len(built.replay.memories), capture_ms, build_ms, trial_ms)


_OURS = (OpaqueError, UnfitError, DriverError, torch.OutOfMemoryError)
"""What may go wrong before the callable has run."""


def _why_not_bind(inputs: Sequence[Any]) -> str | None:
    for index, value in enumerate(inputs):
        if value is not None and not isinstance(value, torch.Tensor | int):
            return f"input {index} is a {type(value).__name__}"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
