"""A compiled graph with dynamic sizes: each size that keeps coming back is decided apart, and all others are launched.

How many are decided is bounded. The one that was not used for longest makes room for the next, but not while it is in use, and
not for ever: what is set up again and again costs more than it saves. Knows nothing of torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.common.guard import guarded
from pygraphd.schema.messages import MAX_SIZES

if TYPE_CHECKING:
    from pygraphd.client.common.report import Report

Runnable = Callable[[list[Any]], Any]
Sizes = tuple[int, ...]

REMEMBERED = 64
"""Sizes that are remembered, the latest, whether or not they come back."""
IDLE_TICKS = 16
"""Changes of size, or calls of one and the same that is not decided, after which a size that was not used makes room."""
SETUPS_OF_EACH = 4
"""Times the bound is how often sizes are set up in all."""

NOT_YET = "dynamic sizes that had not come back often enough to be decided"
TOO_MANY = "more dynamic sizes than are decided apart (PYGRAPH_SIZES)"
BEING_DECIDED = "called from another thread while a dynamic size was looked up"
FORWARD_LAUNCHED = "its forward was launched for its dynamic size"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many dynamic sizes of a graph are decided apart, at a time, and at which of its calls one is."""

    sizes: int = 8
    calls: int = 3


@dataclass(frozen=True, slots=True)
class OfSize:
    """What runs one size; `close` gives back what it keeps, when another takes its place."""

    run: Runnable
    close: Callable[[], None]


class Steps:
    """The sizes of one forward, which its backward goes by: those of the latest forward are a step's.

    Two steps of different sizes in flight can be taken for one another. Then a decision rests on the wrong forward, and
    nothing worse.
    """

    def __init__(self, family: object) -> None:
        """Begin with `family`, which stands for all that has no dynamic sizes."""
        self.latest: Sizes = ()
        self.set_up: set[Sizes] = set()
        """Those at which the forward is decided, or is being measured."""
        self._families: dict[Sizes, object] = {(): family}
        self._has_leader = False

    def lead(self) -> bool:
        """Return whether it is for this part of a forward to say the sizes: for the first that has any."""
        leads, self._has_leader = not self._has_leader, True
        return leads

    @property
    def led(self) -> bool:
        """Whether a forward says the sizes."""
        return self._has_leader

    def family(self) -> object:
        """Return one object for all parts of a step with the latest sizes."""
        return self._families.setdefault(self.latest, object())


class Sized:
    """Runs a graph by its dynamic sizes; call it with the list of inputs that Inductor hands over."""

    def __init__(
        self,
        launch: Runnable,
        bounds: Bounds,
        steps: Steps,
        begin: Callable[[], bool],
        decide: Callable[[Sizes, Sizes], OfSize],
        whole: Callable[[Sized], Runnable],
        report: Report,
    ) -> None:
        """Run by `launch` what is not decided, and by what `decide` returns what is.

        `begin` is called once there are sizes, and returns whether they are those of `steps`; if not, a call has the sizes of its
        step and its own, and is launched if the step's are not set up. `decide` takes all sizes of a call, and its own. `whole`
        returns what runs a graph that turns out to have no sizes, or too many in a call.
        """
        self._launch = launch
        self._bounds = bounds
        self._steps = steps
        self._begin = begin
        self._decide = decide
        self._whole = whole
        self._report = report
        self._leads = False
        self._integers: list[int] | None = None  # which inputs are integers is the same at every call
        self._slots: dict[Sizes, OfSize] = {}
        self._runs: dict[Sizes, Runnable] = {}
        self._used = used = dict[Sizes, int]()
        self._seen = BoundedLRU[Sizes, int](REMEMBERED, lambda sizes: used.pop(sizes, None))
        # A CUDA error of the user's may surface in any call of ours, and must surface in theirs.
        self._guarded = guarded(report, "dynamic sizes", in_full=True)
        self._latest: Sizes | None = None
        self._ticks = 0
        self._stays = False
        self._setups = 0
        self._deciding = threading.Lock()
        self._changing = threading.Lock()
        """Of the slots; never held for longer than it takes to change them."""

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        integers = self._integers
        if integers is None:
            integers = self._look_at(inputs)
            if integers is None:
                return self._step_aside(BEING_DECIDED, inputs)
        sizes = own = tuple(map(inputs.__getitem__, integers))
        steps = self._steps
        if self._leads:
            steps.latest = own
        elif steps.led:
            step = steps.latest
            sizes = (*step, *own)
            if step not in steps.set_up:
                return self._step_aside(FORWARD_LAUNCHED, inputs)
        if sizes != self._latest:
            self._note_change(sizes)
        run = self._runs.get(sizes)
        return run(inputs) if run is not None else self._cold(sizes, own, inputs)

    def replace(self, sizes: Sizes, one: object, other: Runnable) -> bool:
        """Put one callable in the place of another, which runs some sizes; return whether that was there."""
        with self._changing:
            slot = self._slots.get(sizes)
            if slot is None or slot.run is not one:
                return False
            self._slots[sizes] = replace(slot, run=other)
            self._runs[sizes] = other
            return True

    def _look_at(self, inputs: list[Any]) -> list[int] | None:
        """Find out, at the first call, where the sizes are; None while another thread does."""
        if not self._deciding.acquire(blocking=False):
            return None
        try:
            if self._integers is None:
                self._integers = self._find(inputs)
            return self._integers
        finally:
            self._deciding.release()

    def _find(self, inputs: list[Any]) -> list[int]:
        integers = [index for index, value in enumerate(inputs) if type(value) is int]
        sizes = len(integers) + (len(self._steps.latest) if self._steps.led else 0)
        if 0 < sizes <= MAX_SIZES:
            self._leads = bool(self._guarded(self._begin))
            return integers
        self._steps = Steps(None)  # no sizes are told from others
        self._runs[()] = self._guarded(lambda: self._whole(self)) or self._launch
        return []

    # --- sizes that are not decided ---

    def _note_change(self, sizes: Sizes) -> None:
        self._ticks += 1
        self._used[sizes] = self._ticks
        self._stays = False
        self._latest = sizes

    def _cold(self, sizes: Sizes, own: Sizes, inputs: list[Any]) -> Any:
        if not self._deciding.acquire(blocking=False):
            return self._step_aside(BEING_DECIDED, inputs)
        try:
            reason = self._why_not_decide(sizes)
            run = self._set_up(sizes, own) if reason is None else self._launch
        finally:
            self._deciding.release()
        return self._step_aside(reason, inputs) if reason is not None else run(inputs)

    def _step_aside(self, reason: str, inputs: list[Any]) -> Any:
        self._report.count_fallback(reason)
        return self._launch(inputs)

    def _why_not_decide(self, sizes: Sizes) -> str | None:
        # The step's sizes have come back when they are set up; others of its own within a step may not.
        is_awaited = self._follows() and not self._knows_step(sizes)
        calls = self._count(sizes)
        if calls < self._bounds.calls and not is_awaited:
            return NOT_YET
        if self._setups >= SETUPS_OF_EACH * self._bounds.sizes:
            return TOO_MANY
        if len(self._slots) < self._bounds.sizes:
            return None
        return TOO_MANY if calls < self._calls_to_make_room() and not is_awaited else self._make_room()

    def _calls_to_make_room(self) -> int:
        """Return from which call of a size on another one makes room for it: twice as many with each round of sizes that were set up.

        Recording one takes as long as hundreds of launches. Where sizes push each other out, few come back as often.
        """
        return int(self._bounds.calls << (self._setups // max(self._bounds.sizes, 1)))

    def _count(self, sizes: Sizes) -> int:
        """Count a call of a size that is not decided; the latest such sizes are remembered."""
        self._ticks += self._stays
        self._stays = True
        count = self._seen[sizes] = self._seen.get(sizes, 0) + 1
        return count

    def _make_room(self) -> str | None:
        oldest = next(filter(self._is_gone, self._slots), None)
        if oldest is None:
            oldest = min(self._slots, key=lambda sizes: self._used.get(sizes, 0))
            if self._used.get(oldest, 0) > self._ticks - IDLE_TICKS:
                return TOO_MANY
        with self._changing:
            del self._runs[oldest]
            slot = self._slots.pop(oldest)
        self._used.pop(oldest, None)
        if self._leads:
            self._steps.set_up.discard(oldest)
        self._guarded(slot.close)
        return None

    def _follows(self) -> bool:
        return self._steps.led and not self._leads

    def _knows_step(self, sizes: Sizes) -> bool:
        step = self._steps.latest
        return any(each[: len(step)] == step for each in (*self._slots, *self._seen))

    def _is_gone(self, sizes: Sizes) -> bool:
        """Whether the forward is launched at the sizes of this step, which come first."""
        return self._follows() and sizes[: len(self._steps.latest)] not in self._steps.set_up

    def _set_up(self, sizes: Sizes, own: Sizes) -> Runnable:
        self._setups += 1
        del self._seen[sizes]
        slot = self._guarded(lambda: self._decide(sizes, own)) or OfSize(self._launch, _nothing)
        with self._changing:
            self._slots[sizes] = slot
            self._runs[sizes] = slot.run
        if self._leads:
            self._steps.set_up.add(sizes)
        return slot.run


def _nothing() -> None:
    """Have nothing to give back."""
