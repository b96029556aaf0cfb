"""The exceptions that pass between rooms, except `DriverError`, and the reasons of fallbacks that several rooms give."""

from __future__ import annotations

import enum

# Named here, so that a trial and a recording give one reason, whichever of them meets the call.
IN_A_CAPTURE = "called while the user captures the stream"
PROFILED = "called while a profiler runs"
REENTERED = "called by a signal handler or a finalizer within another call"


class LayoutMismatch(enum.Enum):
    """A difference between a call and the layout of its recording."""

    OVERLAP = "inputs that shared memory when it was recorded lie otherwise"
    ALIGNMENT = "an input is not aligned as it was when it was recorded"
    GENERATOR = "it draws random numbers from another generator than when it was recorded"
    HOOKS = "saved-tensor hooks are active, and it was recorded while none were"


class FallbackError(Exception):
    """A recording cannot serve one call, which runs as KERNELS instead; the text is the reason."""

    mismatch: LayoutMismatch | None = None
    """The layout that another recording would have to support to serve the call; None: no recording could."""


class LayoutMismatchError(FallbackError):
    """A call does not match the layout of its recording."""

    def __init__(self, mismatch: LayoutMismatch) -> None:
        super().__init__(mismatch.value)
        self.mismatch = mismatch


class DisturbedError(FallbackError):
    """A call cannot be recorded or served for a reason in its stream, its thread or in chance: the next call of the size may be."""


class ProfiledError(DisturbedError):
    """A call cannot be recorded or served while a profiler runs."""

    def __init__(self) -> None:
        super().__init__(PROFILED)


class NotRelocatableError(Exception):
    """A graph cannot be recorded, since addresses in it cannot be rewritten; the text is the reason."""


class TransientError(NotRelocatableError):
    """A graph cannot be recorded now, for a reason that does not lie in the graph."""


class NoMemoryError(TransientError):
    """There is not enough free memory for recording and for the call that follows."""


class RanksError(FallbackError):
    """Not all ranks record a graph with collectives in this call; the text is the reason."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good
        """Whether none of them is to try again."""


# No FallbackError: KERNELS, which a fallback would run, are what there was no memory for.
class OutOfStepError(Exception):
    """This rank has lacked the memory to run the collectives that the others have run. A later one would be matched with theirs.

    So the program gets the out-of-memory error, as it does without PyGraph where a rank lacks memory.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class StuckError(RanksError):
    """The GPU waits for another rank. Memory that its work uses must not be released: releasing it would wait for the GPU, without a limit."""
