"""A compiled graph with dynamic sizes: each size that keeps coming back is decided by itself; all others run as KERNELS.

A size that the cache has a decision for is set up at its first call, the most used ones first where there is no time to record all. The
number of decided sizes is bounded. A new size replaces the one that was unused for longest, unless that is still in use. Replacements are
bounded too, and so is the time that recordings take (`time_budget.py`), since each setup costs time. Needs no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.common.guard import guarded
from pygraphd.client.dispatch.slot import Slot
from pygraphd.client.dispatch.time_budget import FREE_SIZES, Account, KernelsTime, TimeBudget
from pygraphd.schema.messages import MAX_INTEGER_INPUTS

if TYPE_CHECKING:
    from pygraphd.client.common.report import Report

Runnable = Callable[[list[Any]], Any]
Sizes = tuple[int, ...]

REMEMBERED = 512
"""Undecided sizes that are remembered: those seen last, whether or not they come back."""
IDLE_TICKS = 16
"""Ticks after which an unused size may be replaced. A tick is a change of size, or a repeated call of an undecided size."""
SETUPS_PER_SIZE = 4
"""Bound on how often sizes are set up in all, as a multiple of how many are decided at a time. The time budget does not bound this well: sizes
that replace each other for ever would spend on recordings all that graphs save."""

NOT_OFTEN_ENOUGH = "dynamic sizes that were called too few times to be decided"
TOO_MANY_TO_DECIDE = "more dynamic sizes than may have a decision of their own (PYGRAPH_SIZES)"
NO_TIME = "dynamic sizes that were repeated while recordings had used up their time budget"
BEING_DECIDED = "called from another thread while a dynamic size was looked up"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one graph: `sizes` are decided at a time, and a size is set up at its call number `calls`."""

    sizes: int = 64
    calls: int = 3


@dataclass(frozen=True, slots=True)
class DecidedSize:
    """The slot of one size, and `close`, which releases its memory when another size takes its place."""

    slot: Slot
    close: Callable[[], None]
    is_recorded: bool = True
    """Whether a recording of it is to be expected: none of a size that the cache knows as KERNELS."""
    recording_us: Callable[[], float] = lambda: 0.0
    """Returns the host time of its recordings so far, in microseconds."""
    replays: Callable[[], int] = lambda: 0
    """Returns the number of its calls as a GRAPH so far."""
    saving_us: Callable[[float | None], float | None] = lambda _: None
    """Returns the microseconds that a call as a GRAPH saves, given the least that any call of the graph takes as KERNELS; None: not known."""
    interrupt: Callable[[], bool] = lambda: False
    """Called where another size is called after this one; returns whether this size is still being measured."""


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """What the cache knows of the sizes of a graph: `order` has those with a decision, the most used first."""

    order: tuple[Sizes, ...]
    recall: Callable[[Sizes], DecidedSize | None]
    """Decides a size of `order`; None: its decision is not used any more."""
    kernels: frozenset[Sizes] = frozenset()
    """The sizes of `order` that are known as KERNELS: there is nothing to record."""


NOTHING_KNOWN = KnownSizes((), lambda _sizes: None)


class ShapeDispatcher:
    """Runs a graph by its dynamic sizes; call it with Inductor's list of inputs."""

    def __init__(
        self,
        run_kernels: Runnable,
        bounds: Bounds,
        begin: Callable[[], object],
        decide: Callable[[Sizes], DecidedSize],
        whole: Callable[[], Runnable],
        report: Report,
        look_up: Callable[[], KnownSizes] | None = None,
        budget: TimeBudget | None = None,
    ) -> None:
        """Run undecided sizes by `run_kernels`, and each decided size by the slot that `decide(sizes)` returned.

        `begin` and then `look_up` are called at the first call with integer inputs. `whole` returns the callable for a graph without such
        inputs, or with too many of them. `budget` bounds the time of recordings; None: one of its own does.
        """
        self._run_kernels = run_kernels
        self._bounds = bounds
        self._begin = begin
        self._decide = decide
        self._whole = whole
        self._look_up = look_up
        self._known = NOTHING_KNOWN
        self._ranks: dict[Sizes, int] = {}
        self._report = report
        self._integers: list[int] | None = None  # which inputs are integers is the same at every call
        self._decided: dict[Sizes, DecidedSize] = {}
        self._runs: dict[Sizes, Runnable] = {}
        self._used: dict[Sizes, int] = {}
        self._measured: dict[Sizes, Callable[[], bool]] = {}
        self._seen = BoundedLRU[Sizes, int](REMEMBERED)
        self._latest: Sizes = ()
        self._ticks = 0
        self._stays = False
        self._setups = self._recorded = 0
        self._budget = budget or TimeBudget()
        self._kernels = KernelsTime()
        self._accounts: dict[Sizes, Account] = {}
        self._deciding = threading.Lock()
        # A CUDA error of the user's work may surface in our calls, and must surface in the user's own.
        self._guarded = guarded(report, "dynamic sizes", in_full=True)

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        integers = self._integers
        if integers is None:
            integers = self._find_sizes(inputs)
            if integers is None:
                return self._fall_back(BEING_DECIDED, inputs)
        sizes = tuple(map(inputs.__getitem__, integers))
        if sizes != self._latest:
            self._note_change(sizes)
        run = self._runs.get(sizes)
        return run(inputs) if run is not None else self._cold(sizes, inputs)

    def _find_sizes(self, inputs: list[Any]) -> list[int] | None:
        """Return the indices of the integer inputs, found at the first call; None while another thread searches."""
        if not self._deciding.acquire(blocking=False):
            return None
        try:
            if self._integers is None:
                integers = [index for index, value in enumerate(inputs) if type(value) is int]
                if 0 < len(integers) <= MAX_INTEGER_INPUTS:
                    self._guarded(self._begin)
                    if self._look_up is not None and self._bounds.sizes:
                        self._known = self._guarded(self._look_up) or NOTHING_KNOWN
                        self._ranks = {sizes: rank for rank, sizes in enumerate(self._known.order)}
                else:  # one decision holds for all sizes
                    integers, self._runs[()] = [], self._guarded(self._whole) or self._run_kernels
                self._integers = integers
            return self._integers
        finally:
            self._deciding.release()

    # --- sizes that are not decided ---

    def _note_change(self, sizes: Sizes) -> None:
        self._ticks += 1
        self._stays = False
        before, self._latest = self._latest, sizes
        if sizes in self._runs:
            self._used[sizes] = self._ticks
        # Of a size that is being measured. Another thread may let go of it meanwhile.
        if (interrupt := self._measured.get(before)) is not None and not self._guarded(interrupt):
            self._measured.pop(before, None)

    def _cold(self, sizes: Sizes, inputs: list[Any]) -> Any:
        if not self._deciding.acquire(blocking=False):
            return self._fall_back(BEING_DECIDED, inputs)
        try:
            run, reason = self._runs.get(sizes), None
            if run is None:  # no other thread has decided it meanwhile
                run, reason = self._decided_now(sizes)
        finally:
            self._deciding.release()
        # Outside of the lock: the call may make a recording, and others would fall back for as long.
        if run is not None:
            return run(inputs)
        began_ns = time.perf_counter_ns()
        outputs = self._fall_back(reason or NOT_OFTEN_ENOUGH, inputs)
        if self._seen.get(sizes, 0) > 1:  # the first call of a size may load kernels
            self._kernels.note((time.perf_counter_ns() - began_ns) / 1e3)
        return outputs

    def _fall_back(self, reason: str, inputs: list[Any]) -> Any:
        self._report.count_fallback(reason)
        return self._run_kernels(inputs)

    def _decided_now(self, sizes: Sizes) -> tuple[Runnable | None, str | None]:
        """Count a call of an undecided size; return what runs it from now on, or else the reason why it is not decided."""
        reason = self._why_not_decide(sizes)
        if reason is NOT_OFTEN_ENOUGH and (rank := self._ranks.get(sizes)) is not None:
            reason = self._why_known_waits(sizes, rank)
        is_recalled = reason is None and sizes in self._ranks
        known = self._guarded(lambda: self._known.recall(sizes)) if is_recalled else None
        if known is None and reason is None and self._is_known_as_kernels(sizes):
            del self._ranks[sizes]  # its entry is not used any more, so that it is a size as any other
            reason = NOT_OFTEN_ENOUGH
        return (self._set_up(sizes, known) if known or reason is None else None), reason

    def _why_not_decide(self, sizes: Sizes) -> str | None:
        if self._count(sizes) < self._bounds.calls:
            return NOT_OFTEN_ENOUGH
        if reason := self._why_no_more(sizes):
            return reason
        return None if len(self._decided) < self._bounds.sizes else self._make_room()

    def _why_known_waits(self, sizes: Sizes, rank: int) -> str | None:
        """Return why a size that the cache knows waits for a later call; `rank` is the number of known sizes that are used more.

        Of those that there is no time to record yet, the most used ones come first: the time that is left is kept for them.
        """
        if reason := self._why_no_more(sizes):
            return reason
        if len(self._decided) >= self._bounds.sizes:
            return TOO_MANY_TO_DECIDE
        if self._is_known_as_kernels(sizes):
            return None
        now = (self._guarded(self._budget.setups_now) or 0) + max(FREE_SIZES - self._recorded, 0)
        return NO_TIME if rank >= self._setups + now else None

    def _why_no_more(self, sizes: Sizes) -> str | None:
        if self._setups >= SETUPS_PER_SIZE * self._bounds.sizes:
            return TOO_MANY_TO_DECIDE
        if self._recorded < FREE_SIZES or self._is_known_as_kernels(sizes):
            return None
        return None if self._guarded(self._budget.is_spent) is False else NO_TIME

    def _is_known_as_kernels(self, sizes: Sizes) -> bool:
        """Return whether there is nothing to record. Of a size that comes back after it made room, the entry may be another one by now."""
        return sizes in self._known.kernels and sizes in self._ranks

    def _count(self, sizes: Sizes) -> int:
        self._ticks += self._stays
        self._stays = True
        count = self._seen[sizes] = self._seen.get(sizes, 0) + 1
        return count

    def _make_room(self) -> str | None:
        oldest = min(self._decided, key=lambda sizes: self._used.get(sizes, 0))
        if self._used.get(oldest, 0) > self._ticks - IDLE_TICKS:
            return TOO_MANY_TO_DECIDE
        # First, so that no call of another thread begins on a size that is being closed.
        del self._runs[oldest]
        decided = self._decided.pop(oldest)
        self._used.pop(oldest, None)
        self._measured.pop(oldest, None)
        account = self._accounts.pop(oldest)
        self._guarded(lambda: self._budget.close(account))
        self._guarded(decided.close)
        return None

    def _set_up(self, sizes: Sizes, known: DecidedSize | None) -> Runnable:
        self._setups += 1
        del self._seen[sizes]
        self._ranks.pop(sizes, None)  # what the cache has may be another decision by the time it comes back
        # Counts as decided, so that a setup that fails is not repeated at each call.
        failed = DecidedSize(Slot(self._run_kernels), lambda: None, is_recorded=False)
        decided = known or self._guarded(lambda: self._decide(sizes)) or failed
        account = Account(self._kernels, decided.recording_us, decided.replays, decided.saving_us)
        self._accounts[sizes] = account
        is_recorded, is_free = decided.is_recorded, self._recorded < FREE_SIZES
        self._guarded(lambda: self._budget.open(account, is_recorded=is_recorded, is_free=is_free))
        self._recorded += is_recorded
        self._measured[sizes] = decided.interrupt
        self._used[sizes] = self._ticks
        self._decided[sizes] = decided
        self._runs[sizes] = decided.slot
        return decided.slot
