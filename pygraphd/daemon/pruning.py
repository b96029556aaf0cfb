"""The request and the answer of `cache prune`, as daemon and command exchange them."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.errors import UsageError
from pygraphd.schema.checks import (
    InvalidMessageError,
    check_bool,
    check_digest,
    check_int,
    check_number,
    check_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NAMED = 64
"""Entries named in one request: few enough for one transaction."""
CENTURY_S = 3.2e9
"""The greatest age that a request can name, in seconds: beyond, nothing can be."""


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """Selects entries unused for `older_than_s` seconds (0: of any age) on GPUs whose name contains `gpu` ("": any).

    `entries` names some by their ids, and `everything` means all, those that wait in the spool too; each is given alone. At least
    one field is required: an empty request would mean all entries.
    """

    older_than_s: float = 0.0
    gpu: str = ""
    dry_run: bool = False
    entries: tuple[str, ...] = ()
    everything: bool = False

    def __post_init__(self) -> None:
        check_number("older_than_s", self.older_than_s, maximum=CENTURY_S)
        check_text("gpu", self.gpu, maximum=256)
        check_bool("dry_run", self.dry_run)
        check_bool("everything", self.everything)
        if len(self.entries) > MAX_NAMED:
            raise InvalidMessageError(f"entries: {len(self.entries)} items, at most {MAX_NAMED} allowed")
        for entry in self.entries:
            check_digest("entries", entry)
        ways = (bool(self.older_than_s or self.gpu), bool(self.entries), self.everything)
        if not any(ways):
            raise InvalidMessageError("prune: give older_than_s or gpu, or entries, or everything")
        if sum(ways) > 1:
            raise InvalidMessageError("prune: entries and everything are given alone")

    def as_json(self) -> dict[str, object]:
        """Return the body of `POST /v1/prune`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class PruneAnswer:
    """The number of entries and measurements deleted, or with `dry_run` to be deleted; `freed_bytes`: by how much the file shrank."""

    entries: int
    measurements: int
    freed_bytes: int
    dry_run: bool

    def __post_init__(self) -> None:
        for name in ("entries", "measurements", "freed_bytes"):
            check_int(name, getattr(self, name), maximum=2**62)
        check_bool("dry_run", self.dry_run)

    def __add__(self, other: PruneAnswer) -> PruneAnswer:
        return PruneAnswer(
            self.entries + other.entries,
            self.measurements + other.measurements,
            self.freed_bytes + other.freed_bytes,
            self.dry_run,
        )

    def as_json(self) -> dict[str, object]:
        """Return the answer as JSON has it."""
        return {"schema": 1, **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class PruneProgress:
    """A prune that goes on in pieces: what was deleted so far, and the row behind which the rest lies; None if nothing is left.

    `began` is the time from which ages count, in seconds since the epoch: what is used during a prune does not grow old by it.
    """

    entries: int = 0
    measurements: int = 0
    after: int | None = 0
    began: float = dataclasses.field(default_factory=time.time)

    @property
    def is_complete(self) -> bool:
        """Whether all entries have been looked at."""
        return self.after is None

    def answer(self, request: PruneRequest, freed_bytes: int) -> PruneAnswer:
        """Return the answer of a prune that is complete."""
        # Records that came meanwhile may have made the file grow.
        freed = 0 if request.dry_run else max(freed_bytes, 0)
        return PruneAnswer(self.entries, self.measurements, freed, request.dry_run)


def delete_requests(ids: Sequence[str], dry_run: bool) -> list[PruneRequest]:
    """Return the requests that delete some entries by their ids."""
    return [
        PruneRequest(dry_run=dry_run, entries=tuple(ids[start : start + MAX_NAMED]))
        for start in range(0, len(ids), MAX_NAMED)
    ]


def prune_request(older_than_s: float | None, gpu: str | None, dry_run: bool) -> PruneRequest:
    """Return the request that a command's options ask for; raises UsageError if they name nothing."""
    if not older_than_s and not gpu:
        raise UsageError(
            "prune deletes what you name: give --older-than 30d, --gpu NAME, or both (try --dry-run)"
        )
    try:
        return PruneRequest(older_than_s or 0.0, gpu or "", dry_run)
    except InvalidMessageError as error:
        raise UsageError(str(error)) from error
