"""Makes one recording: capture a call, build a replay of it, run the replay on copies of the inputs, and compare with KERNELS.

`Pipeline.record` captures, builds and replays before the call itself runs as KERNELS. `Pipeline.compare` compares after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import (
    DisturbedError,
    FallbackError,
    NoMemoryError,
    NotRelocatableError,
    OutOfStepError,
    ProfiledError,
    RanksError,
    StuckError,
    TransientError,
)
from pygraphd.client.common import log
from pygraphd.client.common.garbage import no_garbage_collection
from pygraphd.client.common.signals import handlers_put_off, raised_by_handler
from pygraphd.client.recording import builder, stand_ins
from pygraphd.client.recording.alias_sets import InputGroups, input_groups, only_for_backward
from pygraphd.client.recording.budget import Budget
from pygraphd.client.recording.call_conditions import why_not_bind
from pygraphd.client.recording.capture import AddressesError, Capture, CudaRecorder
from pygraphd.client.recording.comparison import ALL_NAN, Disagreement, is_any_all_nan
from pygraphd.client.recording.device_waits import GPU_WAITS
from pygraphd.client.recording.false_pointers import CAPTURES_DIFFER, CapturedCall
from pygraphd.client.recording.host_copies import for_host
from pygraphd.client.recording.output_reserves import MAX_CAPTURES, OutputReserve, backing_for, reserves_for
from pygraphd.client.recording.size_slot import LayoutConstraints, Persistence, Refusal
from pygraphd.client.recording.stand_ins import RecordedCall, StandIns
from pygraphd.client.recording.verification import WROTE_TO_INPUT, Verification, bytes_to_compare
from pygraphd.client.replay.outputs import Input, Same, View
from pygraphd.client.replay.replay import Replay
from pygraphd.client.replay.rng import Generators, generators_in
from pygraphd.schema.reasons import ReasonCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Runnable
    from pygraphd.client.common.report import Report
    from pygraphd.client.decisions.ranks.lockstep import Lockstep

DIGESTS_FROM = 32 << 20
"""Bytes of a replay and of copies from which on large values are compared by digests: less would save little memory."""
INTERRUPTED = "its capture was ended by another thread, as by one that waits for the whole device"
_SAYS_INTERRUPTED = "previous error during capture"
"""Part of CUDA's message when another thread has ended the capture. An error of the capturing thread itself has another message."""
NEW_THREAD = "it could not be captured in a thread that had not run it before"
STUCK_S = 30.0
"""Seconds after which the GPU is taken to wait for a rank that has died or is late."""
STUCK = f"the GPU has waited {STUCK_S:g} s for another rank"
MAX_RETRIES = 3
"""Times a callable is recorded again after a `DisturbedError` of one reason. Then its size is refused, since each capture is expensive."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A recording that has run on copies of a call's inputs, and is to be compared with KERNELS."""

    replay: Replay
    verification: Verification
    call: RecordedCall
    """The call that was captured. Its aliased memory stays: the replay may run again, and may be wrong."""
    nodes: int
    captured: tuple[StandIns, Capture]
    """What was captured: a recording may run again where an earlier one differed, and until then there has to be memory where it was captured."""

    def let_go(self) -> None:
        """Release the memory that the capture worked on, but for addresses that share some."""
        tensors, capture = self.captured
        for each in (tensors.tensors, tensors.memory, tensors.ranges):
            each.clear()
        capture.let_go()

    def keep(self) -> Replay:
        """Return the replay, and release the memory of the verification."""
        if not self.verification.random:
            self.replay.forget_random_numbers()
        self._release()
        return self.replay

    def close(self) -> None:
        """Destroy the replay, and release the memory of the verification."""
        self.replay.close()
        self._release()

    def _release(self) -> None:
        self.verification.close()
        self.let_go()
        self.call.close()


class Pipeline:
    """Makes the recordings of one callable."""

    def __init__(
        self, run_kernels: Runnable, recorder: CudaRecorder, report: Report, facts: GraphFacts
    ) -> None:
        self._run_kernels = run_kernels
        self._recorder = recorder
        self._report = report
        self._budget = Budget(recorder, report)
        self._facts = facts
        # From torch 2.13 on, a capture is no matter of other threads that draw.
        self._may_draw = facts.may_draw or not torch_private.graphs_share_random_state()
        self.captures = 0
        """The number of captured calls, whether or not a recording was made."""
        self.host_us = 0.0
        """Host time of all recordings and comparisons so far, in microseconds."""
        self._retries: Counter[str] = Counter()
        self._threads = threading.local()
        self.stuck: list[StuckError] = []
        """Errors that hold the memory on which the GPU may still work."""

    def note_kernels_ran(self) -> None:
        """Note that the current thread has run the callable as KERNELS."""
        self._threads.kernels_ran = True

    def record(
        self,
        inputs: list[Any],
        constraints: LayoutConstraints,
        *,
        differed: bool = False,
        in_full: frozenset[int] | None = None,
        lockstep: Lockstep | None = None,
    ) -> Attempt | Refusal:
        """Record a call, and replay it on copies of its inputs. Raises nothing but the out-of-memory error of an `OutOfStepError`.

        See `RecordedCall` for `differed`, `in_full` and `lockstep`. A call with collectives needs a `lockstep`, and must not have `differed`.
        """
        attempt = None
        try:
            if lockstep is None and not self._recorder.may_wait():
                return Refusal(GPU_WAITS, Persistence.TRANSIENT, ReasonCode.GPU_WAITS)
            if differed or lockstep is not None:
                in_full = None
            # Not while ranks wait for each other, which may take half a minute: `CudaRecorder.capture` has handlers wait for itself.
            until_done = handlers_put_off() if lockstep is None else contextlib.nullcontext()
            with until_done, self._timed(), no_garbage_collection():
                attempt = self._record(inputs, constraints, in_full, lockstep, differed=differed)
            return attempt  # noqa: RET504 - a handler may raise where the block ends
        except OutOfStepError as error:
            out_of_memory = error.error
        except BaseException as error:
            if attempt is not None:
                attempt.close()  # a handler that was put off has raised
            if not isinstance(error, Exception) or raised_by_handler(error):
                raise
            return self._refusal(error)  # nothing has run yet: the call can run as if nothing had been
        # Without what the recording holds: a program may catch it, and try a smaller batch.
        out_of_memory.__context__ = None
        try:
            raise out_of_memory.with_traceback(None)
        finally:
            del out_of_memory  # it holds this frame

    def _refusal(self, error: Exception) -> Refusal:
        reason = log.first_line(error)
        if isinstance(error, RanksError):
            return self._not_together(error)
        if isinstance(error, TransientError | torch.OutOfMemoryError):
            is_short = isinstance(error, NoMemoryError | torch.OutOfMemoryError)
            self._report.count(refused_for_memory=int(is_short))
            code = ReasonCode.NO_MEMORY_TO_RECORD if is_short else ReasonCode.CANNOT_CAPTURE_NOW
            return Refusal(reason, Persistence.TRANSIENT, code)
        if isinstance(error, NotRelocatableError):
            if str(error) == WROTE_TO_INPUT:
                self._report.count(wrong_results=1)
                log.say(f"{WROTE_TO_INPUT}; its values may be wrong now", is_logged=True)
            return Refusal(reason, Persistence.PERMANENT)
        if isinstance(error, FallbackError | DriverError):
            self._retries[reason] += isinstance(error, DisturbedError)
            is_retried = 0 < self._retries[reason] <= MAX_RETRIES
            is_driver = isinstance(error, DriverError)
            code = ReasonCode.DRIVER_FAILED if is_driver else ReasonCode.CAPTURE_DISTURBED
            return Refusal(reason, Persistence.ONE_CALL if is_retried else Persistence.PROCESS, code)
        return Refusal(f"recording failed: {reason}", Persistence.PROCESS, ReasonCode.RECORDING_FAILED)

    def compare(self, attempt: Attempt, outputs: Sequence[Any]) -> Disagreement | Refusal | None:
        """Return why a recording cannot be used, given the `outputs` of KERNELS; None if it can, and in lockstep those of all ranks can."""
        lockstep = attempt.call.lockstep
        try:
            with self._timed(), no_garbage_collection():
                if lockstep is not None:
                    self._wait_for_gpu()
                found = attempt.verification.disagreement(outputs)
                # Not of collectives, of which a rank alone would refuse the recording.
                if (
                    found is None
                    and lockstep is None
                    and is_any_all_nan(outputs, self._not_computed(attempt))
                ):
                    return Refusal(ALL_NAN, Persistence.TRANSIENT, ReasonCode.RESULTS_NAN)
                if lockstep is not None and found is None:
                    lockstep.go_on()
                return found
        except RanksError as error:
            return self._not_together(error)
        except Exception as error:
            # The call has its result; what cannot be verified is not used.
            if raised_by_handler(error):
                raise
            is_short = isinstance(error, torch.OutOfMemoryError)
            self._report.count(refused_for_memory=int(is_short))
            persistence = Persistence.TRANSIENT if is_short else Persistence.PROCESS
            if isinstance(error, ProfiledError):
                persistence = Persistence.ONE_CALL
            reason = f"verification failed: {log.first_line(error)}"
            return Refusal(reason, persistence, ReasonCode.VERIFICATION_FAILED)

    def _not_computed(self, attempt: Attempt) -> set[int]:
        """Return the indices of outputs that nobody has to compute, or that are inputs which the graph leaves as they are, or views of these."""
        written, outputs = self._facts.written, attempt.replay.layout.outputs.all
        firsts = (outputs[each.index] if isinstance(each, Same) else each for each in outputs)
        returned = {
            index
            for index, each in enumerate(firsts)
            if isinstance(each, Input | View) and written is not None and each.index not in written
        }
        return returned.union(self._facts.undefined)

    def _not_together(self, error: RanksError) -> Refusal:
        if isinstance(error, StuckError):
            self.stuck.append(error)  # its traceback holds what was recorded
        persistence = Persistence.PROCESS if error.for_good else Persistence.ONE_CALL
        return Refusal(str(error), persistence, ReasonCode.RANKS_NOT_RECORDED)

    def _wait_for_gpu(self) -> None:
        if not self._recorder.is_idle_within(STUCK_S):
            raise StuckError(STUCK)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with self._report.recording():
                yield
        finally:
            self.host_us += (time.perf_counter() - began) * 1e6

    def _record(
        self,
        inputs: list[Any],
        constraints: LayoutConstraints,
        in_full: frozenset[int] | None,
        lockstep: Lockstep | None,
        *,
        differed: bool,
    ) -> Attempt:
        require, recorder = self._budget.require, self._recorder
        if reason := why_not_bind(inputs, recorder.device, self._facts, is_in_lockstep=lockstep is not None):
            raise NotRelocatableError(reason)
        groups = input_groups(inputs)
        require(stand_ins.bytes_to_copy(groups, self._facts.written, but_large=True))
        call = RecordedCall(inputs, constraints, groups, recorder.driver, recorder.device, require)
        call.differed, call.in_full, call.lockstep = differed, in_full, lockstep
        # A custom operator may keep what it allocates, and nodes of collectives are not written.
        call.has_memory = lockstep is not None or not self._facts.is_repeatable
        try:
            return self._record_call(call)
        except StuckError:
            raise
        except BaseException:
            call.close()
            raise

    def _record_call(self, call: RecordedCall) -> Attempt:
        tensors, capture = self._capture(call)
        self._report.note_memory(call.held() + tensors.bytes + capture.own_bytes)
        call.bytes_held = tensors.bytes  # a second capture asks for the memory of both captures itself
        saved = only_for_backward(self._facts, capture.outputs, call.inputs)
        built = builder.build(
            self._recorder.driver,
            CapturedCall(capture, tensors.tensors),
            self._report.count_failure,
            functools.partial(self._recapture, call, capture),
            dataclasses.replace(self._facts, saved=saved),
        )
        try:
            capture.release_addresses()
            call.bytes_held += capture.own_bytes
            verification = self._verification(built, capture, tensors, call)
        except StuckError:
            raise
        except BaseException:
            built.replay.close()
            capture.let_go()
            raise
        attempt = Attempt(built.replay, verification, call, built.nodes, (tensors, capture))
        if not call.differed:
            attempt.let_go()
        return attempt

    def _capture(self, call: RecordedCall) -> tuple[StandIns, Capture]:
        """Capture a call on stand-ins, and again with output reserves until no output overlaps with other memory."""
        self.captures += 1
        try:
            # A workspace keeps its whole segment of PyTorch's allocator from going back to the device.
            self._recorder.make_ready()
            if self._recorder.memory_bytes:  # only to keep this limit is an estimate needed
                call.capture_bytes = self._recorder.bytes_of_a_call()
            tensors = call.stand_ins()
            try:
                capture = self._capture_on(call, tensors)
            except NotRelocatableError as error:
                if isinstance(error, TransientError) or not call.has_aliases:
                    raise
                call.has_aliases = False  # an operator may ask more of memory than an address
                tensors = call.stand_ins()
                capture = self._capture_on(call, tensors)
            for done in range(1, MAX_CAPTURES):
                try:
                    reserves = reserves_for(capture, for_all=done == MAX_CAPTURES - 1)
                except BaseException:
                    capture.discard(self._recorder.driver)
                    raise
                if reserves == capture.reserves:
                    break
                backing = backing_for(capture)
                capture.discard(self._recorder.driver)
                capture = self._capture_on(call, tensors, reserves, backing)
        except TransientError:
            self.captures -= 1  # nothing was captured
            raise
        return tensors, capture

    def _recapture(self, call: RecordedCall, first: Capture) -> CapturedCall:
        """Capture a call again at other addresses, while the first capture of it has its addresses still."""
        first.release_addresses()
        # Memory that is free in the pool of that one counts as free, and cannot be used by another capture.
        tensors = call.stand_ins(besides=2 * first.own_bytes, is_further=True)
        try:
            capture = self._capture_on(call, tensors, first.reserves, first.backing, is_shifted=True)
        except NotRelocatableError as error:
            if isinstance(error, TransientError):
                raise
            raise DisturbedError(CAPTURES_DIFFER) from error  # the first capture has worked
        return CapturedCall(capture, tensors.tensors, tensors.ranges)

    def _capture_on(
        self,
        call: RecordedCall,
        tensors: StandIns,
        reserves: Sequence[OutputReserve] = (),
        backing: int = 0,
        *,
        is_shifted: bool = False,
    ) -> Capture:
        run_kernels, inputs = self._run_kernels, list(tensors.tensors)
        addresses = call.addresses(self._recorder.addresses_for_capture(), is_further=is_shifted)
        if addresses is None:
            # Against the limit alone: how much a first capture takes is an estimate, and the allocator says what is not free.
            needed = max(backing, call.capture_bytes + sum(each.size for each in reserves))
            self._budget.require(0, call.held() + tensors.bytes + needed)
        try:
            capture = self._recorder.capture(
                run_kernels,
                inputs,
                reserves,
                backing=backing,
                addresses=addresses,
                is_shifted=is_shifted,
                may_draw=self._may_draw,
            )
            call.capture_bytes = capture.bytes
            return capture
        except (NotRelocatableError, FallbackError, DriverError, torch.OutOfMemoryError) as error:
            if addresses is None or not isinstance(error, torch.OutOfMemoryError):
                raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            if _SAYS_INTERRUPTED in str(error):
                raise DisturbedError(INTERRUPTED) from error
            if not (self._may_draw or isinstance(error, AddressesError)):
                return self._capture_drawing(call, tensors, reserves, backing, is_shifted=is_shifted)
            if addresses is None:
                if not hasattr(self._threads, "kernels_ran"):
                    # At its first call in a thread a library may make a handle, which it cannot make within a capture.
                    raise DisturbedError(NEW_THREAD) from error
                # The callable has run on inputs like these before: it raises because it is being captured.
                raise NotRelocatableError(f"it cannot be captured: {log.first_line(error)}") from error
        # There were too few addresses, or an operator asks more of memory than an address.
        call.has_memory = True
        return self._capture_on(call, tensors, reserves, backing, is_shifted=is_shifted)

    def _capture_drawing(self, call: RecordedCall, *arguments: Any, is_shifted: bool) -> Capture:
        """Capture a callable that was thought not to draw random numbers, as attention with dropout does."""
        had_memory, is_known = call.has_memory, False
        self._may_draw = True
        try:
            capture = self._capture_on(call, *arguments, is_shifted=is_shifted)
            is_known = call.has_memory == had_memory
        finally:
            self._may_draw = is_known  # else it lacked something else
        return capture

    def _in_lockstep(
        self, lockstep: Lockstep, replay: Replay, inputs: list[Any], memory: list[torch.Tensor]
    ) -> Any:
        """Replay once all ranks do. Each then runs the collectives of the call once more, whatever happens: as KERNELS if the replay fails."""
        lockstep.go_on()
        try:
            outputs = replay.serve_on(list(inputs), memory)
        except Exception:
            memory.clear()  # KERNELS need as much, and nothing else may be free
            try:
                self._run_kernels(inputs)
            except torch.OutOfMemoryError as error:
                raise OutOfStepError(error) from None
            self._wait_for_gpu()
            raise
        self._wait_for_gpu()
        return outputs

    def _verification(
        self, built: builder.Built, capture: Capture, tensors: StandIns, call: RecordedCall
    ) -> Verification:
        """Replay on copies of the inputs."""
        written, differed, lockstep = self._facts.written, call.differed, call.lockstep
        copies = stand_ins.bytes_to_copy(call.groups, written)
        memory = sum(memory.bytes for memory in built.replay.layout.memories)
        if copies + memory < DIGESTS_FROM:
            call.in_full = None
        # The call itself must get its memory, unless that of the replay is released before.
        beside = memory if call.in_full is None or call.in_full else 0
        old = [*tensors.memory, *capture.memory(built.device)]
        call.bytes_held += bytes_to_compare(old, call.inputs, call.groups)
        # What the capture worked on is released before the call itself, unless the recording may run again.
        held = call.held(beside * (not differed))
        is_short = self._budget.why_unavailable(copies + memory + beside, held) is not None
        on_host: InputGroups = []
        # The callable runs on aliased copies as well, which would have its collectives run on this rank alone.
        aliased = call.aliased_copies(written) if written and is_short and lockstep is None else None
        if aliased is not None:
            # Twice, since the callable runs on them, too.
            copies = 2 * stand_ins.bytes_to_copy(call.groups, written, but_large=True)
            copies, beside = copies + aliased.memory.nbytes, memory
        elif differed:
            copies, memory, beside = 4 * copies, memory + memory // 2, beside + memory // 2
        elif call.in_full is not None and copies + memory + beside > self._recorder.below_peak():
            on_host = for_host(call.groups, call.inputs, self._facts, call.device)
            copies -= sum(span.size for _, span in on_host)
        self._budget.require(copies + memory + beside, call.held(beside * (not differed)))
        generator, given = self._recorder.generator, generators_in(call.inputs).values()
        if not (self._facts.may_draw or built.replay.draws):
            generator = None  # to put it back would take back what other threads draw
        if generator is not None and given:
            generator = Generators((cast("Any", generator), *given))
        return Verification(
            built.replay,
            call,
            self._facts,
            self._run_kernels,
            generator,
            old,
            tensors.tensors,
            aliased,
            on_host,
            run=None if lockstep is None else functools.partial(self._in_lockstep, lockstep, built.replay),
        )
