"""Keeps the state of the sizes of a callable: recording or refusal, constraints on the next recording, and which sizes are remembered."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraphd.client.backend.errors import LayoutMismatch
from pygraphd.client.common.backoff import Backoff
from pygraphd.client.recording.comparison import Disagreement
from pygraphd.client.replay.relocation_table import MAX_ALIGNMENT, alignment
from pygraphd.client.replay.replay import Replay
from pygraphd.schema.reasons import Reason, ReasonCode, because

Size = tuple[int, ...]
"""The values of the integer inputs of a call."""

FIRST_RETRY = 16
"""Calls of a size that is refused for a transient reason before it is tried again; then twice as many each time."""
FIRST_MISMATCHES = 2
"""Mismatches of a size after which it is recorded again: a single one may be chance."""
STALE_CALLS = 4
"""Calls without a recording, as a multiple of the remembered sizes, after which a size that none of them had is forgotten first."""
MISMATCH_FACTOR = 4
"""How many times as many further mismatches the next recording takes: each recording costs as much as hundreds of calls."""


class Persistence(enum.Enum):
    """How long a refusal holds."""

    PERMANENT = enum.auto()
    """The reason lies in the graph, and holds in the next process too."""
    PROCESS = enum.auto()
    """The next process may succeed: a call of the driver failed, or a bound was reached."""
    TRANSIENT = enum.auto()
    """The reason is the setup of this process, or a lack of free memory. Decisions taken meanwhile are provisional."""
    ONE_CALL = enum.auto()
    """This call is not recorded; the next call of the size is."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a size was not recorded, and how long it holds."""

    reason: str
    persistence: Persistence
    code: ReasonCode = ReasonCode.CANNOT_BE_RECORDED

    @property
    def why(self) -> Reason:
        """The reason as it is stored: the code, with the text as its detail."""
        return because(self.code, self.reason)


@dataclass(slots=True)
class Disagreements:
    """Recordings of one size that differed from KERNELS. Kernels that add in varying order may by chance: one more is made."""

    latest: Disagreement | None = None
    """The disagreement of the latest recording; None once a recording has agreed."""
    in_values: bool = False
    """Whether any recording computed other values. Then the callable is also compared with itself."""
    in_full: frozenset[int] | None = frozenset()
    """The values that the next recording is to keep for the comparison, since their digests differed; None: all."""

    def add(self, found: Disagreement) -> Persistence:
        """Note how a recording differs; return how long the size is refused."""
        if found.by_digest:
            # From the second time on all values are kept, so that digests delay a recording twice at most.
            self.in_full = None if self.in_full else found.by_digest
            return Persistence.ONE_CALL
        before, self.latest = self.latest, found
        self.in_values |= found.in_values
        if before is None:
            return Persistence.ONE_CALL
        # By the place and not by the amount, which varies where kernels add in varying order.
        return Persistence.PERMANENT if before.what == found.what else Persistence.PROCESS


@dataclass(frozen=True, slots=True)
class LayoutConstraints:
    """Layouts that a recording has to support beyond that of the call it is made of, which it serves with inputs aligned as well or better.

    One made with the worst alignment seen, and with inputs apart, serves all calls so far. So a few recordings end the mismatches.
    """

    alignments: Mapping[int, int] = field(default_factory=dict)
    """The worst alignment of each input, in bytes by index of the input."""
    apart: bool = False
    """Whether inputs that overlap in this call need not do so in others."""


class LayoutMismatches:
    """The calls of one size whose inputs are aligned or overlap otherwise than its recording can serve."""

    def __init__(self) -> None:
        self._alignments: dict[int, int] = {}
        self._apart = False
        self._backoff = Backoff(FIRST_MISMATCHES, MISMATCH_FACTOR)

    def add(self, inputs: Sequence[Any], mismatch: LayoutMismatch) -> bool:
        """Note the layout of a call that did not match; return whether the size is to be recorded again."""
        # Each recording supports all layouts seen so far, so that no two of them take turns.
        self._apart |= mismatch is LayoutMismatch.OVERLAP
        for index, value in enumerate(inputs):
            # From `MAX_ALIGNMENT` on an input constrains nothing: no library chooses its kernels by more.
            if isinstance(value, torch.Tensor) and (found := alignment(value.data_ptr())) < MAX_ALIGNMENT:
                self._alignments[index] = min(found, self._alignments.get(index, MAX_ALIGNMENT))
        return self._backoff.count()

    @property
    def constraints(self) -> LayoutConstraints:
        """The layout constraints of the next recording."""
        return LayoutConstraints(self._alignments, self._apart)


@dataclass(slots=True, eq=False)
class SizeSlot:
    """The state of one size: its recording, or why there is none, and what the next recording has to support."""

    size: Size
    replay: Replay | None = None
    is_new: bool = False
    """Whether `replay` has served no call yet."""
    nodes: int = 0
    """Nodes of `replay`, for the summary."""
    refusal: Refusal | None = None
    calls: int = 0
    """Calls so far that were not replayed; counted where ranks record at the same one."""
    called_at: int = 0
    """The number of its latest call that was not replayed, among those of all sizes."""
    shortage: Backoff | None = None
    """When a replay is tried again, in calls; None: the latest one had memory."""
    retries: Backoff = field(default_factory=lambda: Backoff(FIRST_RETRY))
    disagreements: Disagreements = field(default_factory=Disagreements)
    mismatches: LayoutMismatches = field(default_factory=LayoutMismatches)

    def note_shortage(self) -> None:
        """Note that a replay lacked memory. Each try has PyTorch's allocator give back its cache, and tell its observers."""
        self.shortage, self.is_new = self.shortage or Backoff(FIRST_RETRY), True

    def waits_for_memory(self) -> bool:
        """Count a call, and return whether it is to run as KERNELS since replays lacked memory."""
        return self.shortage is not None and not self.shortage.count()

    @property
    def may_be_forgotten(self) -> bool:
        """Whether nothing is lost with it: not a recording, nor a refusal that lasts, as that of wrong results must outlast all other sizes."""
        if self.replay is not None:
            return False
        return self.refusal is None or self.refusal.persistence is Persistence.TRANSIENT


class SizeSlots(OrderedDict[Size, SizeSlot]):
    """The sizes of a callable that are remembered, by their latest calls that were not replayed. To be changed by one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def called(self, size: Size) -> SizeSlot | None:
        """Note a call that is not replayed; return its slot if the size is remembered."""
        self._calls += 1
        if (slot := self.get(size)) is not None:
            slot.called_at = self._calls
            self.move_to_end(size)
        return slot

    def remember(self, size: Size) -> None:
        """Remember a size that was called just now."""
        self.setdefault(size, SizeSlot(size, called_at=self._calls))

    def forget_one(self) -> bool:
        """Forget a size to make room for another; return False if none may be forgotten.

        That is the newest one: of sizes that come in turns, more than are remembered, the others then come back and are recorded. If none of the
        many calls since the oldest one's was replayed, it is the oldest one: the program has gone on to other sizes.
        """
        slots = list(self.values())  # a signal handler may call the graph meanwhile
        oldest = next((slot for slot in slots if slot.may_be_forgotten), None)
        if oldest is None:
            return False
        is_stale = self._calls - oldest.called_at > STALE_CALLS * len(slots)
        found = oldest if is_stale else next(slot for slot in reversed(slots) if slot.may_be_forgotten)
        return self.pop(found.size, None) is not None
