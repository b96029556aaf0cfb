"""Records memory-efficient attention in training: its RNG state passes from forward to backward on the CPU, as with KERNELS.

In a capture this attention leaves its RNG state (seed and offset) on the GPU, and a captured backward reads it there. Forward and backward
would then need the same deployment. Here the state passes as numbers on the host, whatever the deployment of each. The host computes them
without the GPU: the offset is that of the generator plus a constant.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend.errors import IN_A_CAPTURE
from pygraphd.client.common.signals import raised_by_handler
from pygraphd.client.recording.collectives import CollectiveRecordings
from pygraphd.client.recording.recordings import Recordings
from pygraphd.client.replay.native.ffi import Piece, helper

if TYPE_CHECKING:
    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.decisions.ranks.process_group import Groups
    from pygraphd.client.recording.capture import CudaRecorder
    from pygraphd.client.replay.replay import Replay
    from pygraphd.client.replay.rng import PhiloxRange

ON_THE_GPU = "attention's random state was given on the GPU: its forward was captured otherwise"
NOT_SENT = "attention's random state could not be sent to the GPU"
READ_BACK = "attention's random state was read from the GPU: it is not where the generator says"
_SIGN, _RANGE = 1 << 63, 1 << 64
_CPU = torch.device("cpu")


def make_recordings(
    run_kernels: Runnable,
    recorder: CudaRecorder,
    report: Report,
    facts: GraphFacts,
    *more: Any,
    groups: Groups | None = None,
) -> Recordings:
    """Return the recordings of a callable by what its graph has: RNG state of attention, collectives, or neither; see `Recordings`."""
    if any(facts.collectives) and groups is not None and not facts.state:
        return CollectiveRecordings(run_kernels, recorder, report, facts, groups, *more[:1])
    kind = WithHostState if facts.state else Recordings
    return kind(run_kernels, recorder, report, facts, *more)


class _Call(threading.local):
    """The RNG state of the call in the current thread, on the CPU."""

    given: Sequence[torch.Tensor] = ()
    """The state among the inputs."""
    drawn: Sequence[torch.Tensor] | None = None
    """The state among the outputs; None if the outputs hold it already."""

    def set(self, given: Sequence[torch.Tensor] = ()) -> None:
        """Begin or end a call."""
        self.given, self.drawn = given, None


@dataclass(frozen=True, slots=True)
class _Begun:
    """How the offsets of a replay follow from the generator's offset."""

    offsets: tuple[int, ...]
    """For each offset among the outputs: its distance from the generator's offset before the replay."""
    fill: Callable[[list[Any], list[Any], list[Any]], tuple[Any, ...]]
    """Makes a scalar tensor of each, in the storage of one tensor."""


class WithHostState(Recordings):
    """Recordings of a graph that has RNG state of attention: recorded and verified with it on the GPU, called with it on the CPU."""

    _needs_draws = True
    _checks_capture = False  # since `_why_not_graph` does

    def __init__(
        self, run_kernels: Runnable, recorder: CudaRecorder, report: Report, facts: GraphFacts, *more: Any
    ) -> None:
        """Record `run_kernels`; see `Recordings`. Results are never checked."""
        super().__init__(self._on_gpu, recorder, report, facts, *more)
        self._compiled = run_kernels
        self._state = facts.state
        self._taken = (*facts.state.inputs, *facts.state.idle_inputs)
        self._device = recorder.device
        self._call = _Call()
        self._begun: weakref.WeakKeyDictionary[Replay, _Begun | None] = weakref.WeakKeyDictionary()
        self._seed, self._idle = _number(0), _number(0)
        # No copy to the GPU: the user may be capturing while the graph is compiled.
        idle_inputs = facts.state.idle_inputs
        self._idle_on_gpu = torch.empty_like(self._idle, device=self._device) if idle_inputs else None

    @property
    def run(self) -> Runnable:
        """The callable for steady state: this object, which moves the state of each call to the GPU and back."""
        return self

    def _run(self, inputs: list[Any]) -> Any:
        if reason := self._why_not_graph(inputs):
            self._report.count_fallback(reason)
            return self._compiled(inputs)
        self._call.set([inputs[index] for index in self._taken])
        try:
            if reason := self._put_on_gpu(inputs):
                return self._fall_back(reason, inputs)
            outputs = super()._run(inputs)
            drawn = self._call.drawn
            return outputs if drawn is None else self._with_state(outputs, drawn)
        finally:
            self._call.set()

    def _put_on_gpu(self, inputs: list[Any]) -> str | None:
        """Replace the state among the inputs by that on the GPU; return why that has failed, None if it has not."""
        state = self._state
        try:
            sent = self._sent([inputs[index] for index in state.inputs])
        except Exception as error:
            # Nothing has run yet. An error of the user's occurs again when the call runs as KERNELS.
            if raised_by_handler(error):
                raise
            return f"{NOT_SENT}: {type(error).__name__}"
        for index, value in zip(state.inputs, sent, strict=True):
            inputs[index] = value
        for index in state.idle_inputs:
            inputs[index] = None
        return None

    def _why_not_graph(self, inputs: Sequence[Any]) -> str | None:
        if self._recorder.in_capture():
            return IN_A_CAPTURE
        return None if all(inputs[index].is_cpu for index in self._taken) else ON_THE_GPU

    def _with_state(self, outputs: Sequence[Any], drawn: Sequence[torch.Tensor]) -> Any:
        made = list(outputs)
        for index, value in zip(self._state.drawn, drawn, strict=True):
            made[index] = value
        for index in self._state.idle_outputs:
            made[index] = self._idle
        return tuple(made) if isinstance(outputs, tuple) else made

    # --- the recorded callable ---

    def _on_gpu(self, inputs: list[Any]) -> list[Any]:
        """Run the compiled callable with its state on the GPU, as a replay does."""
        if self._recorder.in_capture():
            for index in self._state.idle_inputs:
                inputs[index] = self._idle_on_gpu
            outputs = list(self._compiled(inputs))
        else:
            outputs = list(self._given_back(inputs))
            self._call.drawn = [outputs[index] for index in self._state.drawn]
            # The call has its result even if this fails. Then the state is not where verification expects it, and the recording is not used.
            with contextlib.suppress(Exception):
                for index, value in zip(self._state.drawn, self._sent(self._call.drawn), strict=True):
                    outputs[index] = value
        for index in self._state.idle_outputs:
            outputs[index] = None
        return outputs

    def _fall_back(self, reason: str, inputs: list[Any]) -> Any:
        self._report.count_fallback(reason)
        return self._given_back(inputs)

    def _given_back(self, inputs: list[Any]) -> Any:
        """Run the compiled callable on the state that the call was given."""
        for index, value in zip(self._taken, self._call.given, strict=True):
            inputs[index] = value
        return self._compiled(inputs)

    def _sent(self, scalars: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        # CUDA has read pageable memory when the copy returns, and does not wait for the GPU.
        return torch.stack(list(scalars)).to(self._device, non_blocking=True).unbind() if scalars else ()

    # --- the state that a replay returns ---

    def _note_draw(self, replay: Replay, outputs: Any, drawn: PhiloxRange | None) -> None:
        self._call.drawn = self._numbers(replay, outputs, drawn) if self._state.drawn else ()

    def _numbers(
        self, replay: Replay, outputs: Sequence[Any], drawn: PhiloxRange | None
    ) -> Sequence[torch.Tensor]:
        if drawn is not None and (begun := self._begun.get(replay)) is not None:
            return self._known(begun, drawn)
        # Another thread may be capturing, and pinned memory is allocated.
        with self._recorder.driver.relaxed():
            read = _read([outputs[index] for index in self._state.drawn])
        if replay not in self._begun:
            self._begun[replay] = self._learn([int(each) for each in read], drawn)
        else:
            self._report.count_fallback(READ_BACK)
        return read

    def _learn(self, read: Sequence[int], drawn: PhiloxRange | None) -> _Begun | None:
        """Return how the state of a replay follows from the generator's; None if it does not."""
        if drawn is None:
            return None
        seeds, offsets = read[: len(self._state.seeds)], read[len(self._state.seeds) :]
        follows = all(drawn.before <= each < drawn.after for each in offsets)
        if not follows or any(each != _signed(drawn.seed) for each in seeds):
            return None
        pieces = [Piece(index, 0, None, index, (), ()) for index in range(len(offsets))]
        return _Begun(tuple(each - drawn.before for each in offsets), helper.ops.filling(pieces))

    def _known(self, begun: _Begun, drawn: PhiloxRange) -> Sequence[torch.Tensor]:
        seed = self._seed
        if int(seed) != _signed(drawn.seed):
            seed = self._seed = _number(_signed(drawn.seed))
        # Not views in autograd's sense: autograd would detach each of these when it is saved.
        values = [drawn.before + each for each in begun.offsets]
        numbers = torch.tensor(values, dtype=torch.int64, device=_CPU)
        offsets = begun.fill([numbers], [], [None] * len(begun.offsets))
        return [*[seed] * len(self._state.seeds), *offsets]


def _read(scalars: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return scalars on the host, without a wait that `torch.cuda.set_sync_debug_mode` makes an error: it would be raised after a launch."""
    if not all(each.is_cuda for each in scalars):
        return [each.cpu() for each in scalars]
    # One by one: to join them takes memory of the GPU, and there may be none. Waiting for an event is not reported, other than copies that wait.
    pinned = [torch.empty((), dtype=each.dtype, device=_CPU, pin_memory=True) for each in scalars]
    for here, there in zip(pinned, scalars, strict=True):
        here.copy_(there, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(scalars[0].device))
    copied.synchronize()
    # The program gets these scalars, as memory that is not pinned.
    return [each.clone() for each in pinned]


def _number(value: int) -> torch.Tensor:
    return torch.scalar_tensor(value, dtype=torch.int64, device=_CPU)  # not on the user's default device


def _signed(seed: int) -> int:
    """Return a seed as a signed 64-bit number, as attention stores it."""
    return seed - _RANGE if seed >= _SIGN else seed
