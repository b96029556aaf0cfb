"""What becomes of a size whose recording failed: for how long it is refused, and when it is tried again with buffers for inputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pygraphd.client.recording.comparison import Disagreement
from pygraphd.schema.reasons import Reason, ReasonCode, because


class Persistence(enum.Enum):
    """How long a refusal holds."""

    PERMANENT = enum.auto()
    """The reason lies in the graph, and holds in the next process too."""
    PROCESS = enum.auto()
    """The next process may succeed: a call of the driver failed, or a bound was reached."""
    TRANSIENT = enum.auto()
    """The reason is the setup of this process or the memory that is free. What is decided meanwhile is provisional."""
    ONE_CALL = enum.auto()
    """Nothing is refused: the next call of the size is recorded again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a size was not recorded, and for how long that holds."""

    reason: str
    persistence: Persistence
    code: ReasonCode = ReasonCode.CANNOT_BE_RECORDED

    @property
    def why(self) -> Reason:
        """The reason as it is stored: the code, with the text as its detail."""
        return because(self.code, self.reason)


@dataclass(slots=True)
class Disagreements:
    """Recordings of one size that differed from KERNELS on the same inputs, and what follows for the next recording.

    Kernels that add in an order of their own may differ by chance. So a recording that differs is made once more, and the callable is
    compared with itself as well. If values differ again, the next recording has buffers for the inputs that no node refers to: one of
    them may be read after all.
    """

    latest: Disagreement | None = None
    """Of the latest recording, unless one has agreed since."""
    in_values: bool = False
    """Whether any recording has computed other values. Then the callable may differ from itself, and is compared with itself."""
    staged: frozenset[int] = frozenset()
    """Indices of the inputs for which the next recording has buffers."""

    def add(self, found: Disagreement, unreferenced: frozenset[int]) -> Persistence:
        """Note how a recording differs and which inputs no node of it refers to; return how long the size is refused."""
        before, self.latest = self.latest, found
        self.in_values |= found.in_values
        if before is None:
            return Persistence.ONE_CALL
        if found.in_values and not unreferenced <= self.staged:
            self.staged |= unreferenced
            return Persistence.ONE_CALL
        is_the_same = before.what == found.what or self.staged
        return Persistence.PERMANENT if is_the_same else Persistence.PROCESS
