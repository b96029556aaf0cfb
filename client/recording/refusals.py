"""What becomes of sizes whose recording failed: they are tried again, with buffers for unseen inputs, or refused, and for how long."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraphd.client.recording.comparison import Disagreement

    Sizes = tuple[int, ...]


FIRST_LOOK = 16
"""Calls that are refused for now before it is tried again; then twice as many each time."""


class Lasts(enum.Enum):
    """How long a refusal holds."""

    IN_THE_GRAPH = enum.auto()
    """It lies in the graph, and will be so in the next process."""
    IN_THIS_PROCESS = enum.auto()
    """The next process may find it otherwise: a driver's call that failed, a bound that was reached."""
    FOR_NOW = enum.auto()
    """It lies in how this process is set up, or in the memory that is free: what was decided meanwhile is provisional."""


class Refusals:
    """Why the sizes of one callable are launched."""

    def __init__(self) -> None:
        self._reasons: dict[Sizes, str] = {}
        self._lasts: dict[str, Lasts] = {}
        self._calls: dict[Sizes, int] = {}

    def add(self, sizes: Sizes, reason: str, lasts: Lasts) -> None:
        """Refuse some sizes for a reason."""
        self._lasts[reason] = lasts
        self._reasons[sizes] = reason

    def drop(self, sizes: Sizes) -> None:
        """Let some sizes be recorded after all."""
        self._reasons.pop(sizes, None)

    def of(self, sizes: Sizes) -> str | None:
        """Return why some sizes are refused; None if they are not."""
        return self._reasons.get(sizes)

    def is_due(self, sizes: Sizes) -> bool:
        """Count a call that is refused for now; return whether to look if that is over: more and more seldom."""
        calls = self._calls[sizes] = self._calls.get(sizes, 0) + 1
        return calls >= FIRST_LOOK and calls & (calls - 1) == 0

    @property
    def first(self) -> str | None:
        """The reason of what was refused first."""
        return next(iter(self._reasons.values()), None)

    def lasts(self, reason: str) -> Lasts:
        """Return how long what was refused for a reason is."""
        return self._lasts.get(reason, Lasts.IN_THE_GRAPH)


class Disagreements:
    """Recordings of one callable that did something else than the launched call did on the same inputs.

    Kernels that add in an order of their own may differ by chance. So each is made once more, and it is found out how much the callable
    differs from itself; if it disagrees again, with buffers for inputs that show up in no node, one of which may be used after all.
    """

    def __init__(self) -> None:
        self._doubted: set[Sizes] = set()
        self._before: dict[Sizes, Disagreement] = {}
        self._unseen: dict[Sizes, frozenset[int]] = {}

    def staged(self, sizes: Sizes) -> frozenset[int]:
        """Return the inputs that are to have buffers."""
        return self._unseen.get(sizes, frozenset())

    def is_doubted(self, sizes: Sizes) -> bool:
        """Whether a recording of some sizes has computed other values: the callable may differ from itself."""
        return sizes in self._doubted

    def add(self, sizes: Sizes, found: Disagreement, unseen: frozenset[int]) -> Lasts | None:
        """Note what a recording came to, and the inputs that nobody sees in it; return how long it is refused, None: try again."""
        before = self._before.get(sizes)
        self._before[sizes] = found
        if found.in_values:
            self._doubted.add(sizes)
        if before is None:
            return None
        staged = self.staged(sizes)
        if found.in_values and not unseen <= staged:
            self._unseen[sizes] = staged | unseen
            return None
        is_the_same = before.what == found.what or sizes in self._unseen
        return Lasts.IN_THE_GRAPH if is_the_same else Lasts.IN_THIS_PROCESS

    def forget(self, sizes: Sizes) -> None:
        """Note that a recording of these sizes agreed: what comes later is another matter."""
        self._before.pop(sizes, None)
