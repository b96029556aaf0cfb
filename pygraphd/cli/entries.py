"""The entries of a cache as commands show them: one by one, and for listings page by page."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import is_noisy, reason_text
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class CachedEntry:
    """One entry as a row of the listing. `medians_us` has the newest measurement of each deployment measured.

    `spooled`: it is in no cache yet, but in a file that waits for the daemon. `shipped`: it came with the package, and ranks below all others.
    """

    facts: dict[str, Any]
    medians_us: dict[str, float]
    spooled: bool = False
    shipped: bool = False

    @property
    def reason(self) -> Reason:
        """The reason for the deployment."""
        return Reason(ReasonCode(self.facts["reason"]), self.facts["detail"])

    @property
    def against(self) -> Reason:
        """The reason against the other deployment."""
        return Reason(ReasonCode(self.facts["against"]), self.facts["against_detail"])

    @property
    def text(self) -> str:
        """The reason for the deployment, as text."""
        return _text(*map(self.facts.get, _SAID))

    @property
    def is_unmeasured(self) -> bool:
        """Whether it says no more than that a program ended early: see `schema.shipped.is_unmeasured`."""
        return not self.facts["final"] and self.facts["measured_at"] is None

    @property
    def provisional(self) -> str:
        """Why the next program measures the graph anew; empty for a final decision."""
        return _provisional(*map(self.facts.get, _PROVISIONAL))

    def as_json(self) -> dict[str, Any]:
        """Return the entry for `cache inspect --json`: codes with their details, and the text."""
        said = {"text": self.text, "medians_us": self.medians_us, "provisional": self.provisional}
        return {**self.facts, **said, "shipped": self.shipped}


_SAID = ("reason", "detail", "final")
_PROVISIONAL = (*_SAID, "calls")


# Few differ among many entries, and to make one takes as long as all else that is shown of an entry.
@functools.lru_cache(maxsize=1024)
def _text(code: str, detail: str, final: bool) -> str:
    return reason_text(Reason(ReasonCode(code), detail), final=final)


@functools.lru_cache(maxsize=1024)
def _provisional(code: str, detail: str, final: bool, calls: int) -> str:
    if final:
        return ""
    reason = Reason(ReasonCode(code), detail)
    if is_noisy(reason, final=False):
        return "its figures are too noisy"
    return f"seen for {calls} calls only" if reason.code is ReasonCode.TOO_FEW_CALLS else str(reason)


@dataclass(frozen=True, slots=True)
class Page:
    """Entries of a listing, by column: to make an object of each would take longer than to read and to print it.

    `facts` has the columns of `CachedEntry.facts`, `medians_us` one for each deployment, with None where it was not measured.
    """

    facts: Mapping[str, Sequence[Any]]
    medians_us: Mapping[str, Sequence[float | None]]
    shipped: bool = False

    @classmethod
    def of(cls, entries: Sequence[CachedEntry], *, shipped: bool = False) -> Page:
        """Return the page that has these entries."""
        names = entries[0].facts if entries else ()
        facts = {name: [each.facts[name] for each in entries] for name in names}
        medians = {name.value: [each.medians_us.get(name) for each in entries] for name in Deployment}
        return cls(facts, medians, shipped)

    def __len__(self) -> int:
        return len(next(iter(self.facts.values()), ()))

    def __iter__(self) -> Iterator[CachedEntry]:
        rows, medians = zip(*self.facts.values(), strict=True), zip(*self.medians_us.values(), strict=True)
        for row, measured in zip(rows, medians, strict=True):
            known = zip(self.medians_us, measured, strict=True)
            yield CachedEntry(
                dict(zip(self.facts, row, strict=True)),
                {name: median for name, median in known if median is not None},
                shipped=self.shipped,
            )

    def texts(self) -> list[str]:
        """Return the reasons for the deployments, as texts."""
        return list(map(_text, *map(self.facts.__getitem__, _SAID)))

    def provisional(self) -> list[str]:
        """Return for each entry why the next program measures the graph anew."""
        return list(map(_provisional, *map(self.facts.__getitem__, _PROVISIONAL)))


@dataclass(frozen=True, slots=True)
class EntryDetails:
    """One entry with its environment and all its measurements, newest first."""

    entry: CachedEntry
    environment: dict[str, Any]
    measurements: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return the details as `cache show --json` has them."""
        details = {"environment": self.environment, "measurements": self.measurements}
        return {"schema": 1, **self.entry.as_json(), **details}
