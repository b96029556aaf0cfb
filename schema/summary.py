"""The records of a program's summary (`PYGRAPH_SUMMARY=FILE`): the client writes them; `report`, `doctor` and `cache explain` read them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pygraphd.schema.checks import check_bool, check_digest, check_int
from pygraphd.schema.messages import MAX_COUNT, Deployment, Kind, check_sizes
from pygraphd.schema.reasons import NOT_STATED, Reason

SUMMARY_VERSION = 2


class Source(enum.StrEnum):
    """Where a process had a decision from."""

    CACHE = "cache"
    """It was looked up."""
    MEASURED = "measured"
    """The process measured the graph itself."""
    GROUP = "group"
    """Another rank of its process group came to it."""
    RULE = "rule"
    """Nothing was measured: there was nothing to choose from (no CUDA device, say), or it could not be done."""
    UNFINISHED = "unfinished"
    """The program ended before enough calls were seen."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """How one graph runs in one process once it is decided; `graph` and `environment` are digests."""

    graph: str
    kind: Kind
    environment: str
    deployment: Deployment
    reason: Reason
    final: bool
    source: Source
    sizes: tuple[int, ...] = ()
    """The dynamic sizes of these calls; empty: there are none, or all sizes share one decision."""
    against: Reason = NOT_STATED
    """The reason against the other deployment."""
    because: Reason | None = None
    """Why a stored decision was not used as it was; None: there was none, or it was used."""

    def __post_init__(self) -> None:
        check_sizes(self.sizes)
        check_digest("graph", self.graph)
        check_digest("environment", self.environment)
        check_bool("final", self.final)


@dataclass(frozen=True, slots=True)
class Memory:
    """The GPU memory of a process's recordings while they are made; all 0 in a summary of an older version."""

    limit_bytes: int = 0
    """The setting `PYGRAPH_MEMORY`; 0: all that is free."""
    peak_requested_bytes: int = 0
    """The most bytes that a recording asked for at a time, as on one device; the memory of the recorded call itself may be among it."""
    refused_recordings: int = 0
    """Recordings that were not made for lack of memory; a size that is tried again counts again."""

    def __post_init__(self) -> None:
        for name in ("limit_bytes", "peak_requested_bytes", "refused_recordings"):
            check_int(name, getattr(self, name), maximum=MAX_COUNT)
