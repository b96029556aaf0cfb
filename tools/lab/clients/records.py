"""The result file of `clients`: a record for each process, and whether its results agree with those of plain `torch.compile`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchmarkError
from benchmarks.records import read_result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

EAGER, DEFAULT = "eager", "default"
_SMALL = 0.1
"""Differences of smaller values are relative to this."""


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """One process of a client; docs/benchmarks.md defines the fields. None or empty: not known."""

    client: str
    variant: str
    repetition: int
    step_ms: float | None = None
    first_step_s: float | None = None
    steps: int | None = None
    reserved_mb: float | None = None
    allocated_mb: float | None = None
    checks: dict[str, list[float]] = field(default_factory=dict)
    tolerance: float | None = None
    eager_tolerance: float | None = None
    raised: str = ""
    """The line that says why the process failed."""
    skipped: str = ""
    """Why there was no process."""
    seconds: float | None = None
    """Of the process, from its start to its end."""
    deployed: dict[str, int] | None = None
    nodes_in_graphs: int | None = None
    reasons: dict[str, int] | None = None
    fallbacks: dict[str, int] | None = None
    failures: dict[str, int] | None = None
    against: str = ""
    """The variant that its checks were compared with."""
    difference: float | None = None
    """The largest relative difference of a check, at most 1e9."""
    agrees: bool | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """Client, variant and repetition: no two records of a file share them."""
        return self.client, self.variant, self.repetition


def compared(records: Sequence[ClientRecord]) -> list[ClientRecord]:
    """Return records with the fields of the comparison: against the first run with `default`, or without one in eager mode."""
    return [_compared(each, _reference(records, each)) for each in records]


def _reference(records: Sequence[ClientRecord], record: ClientRecord) -> ClientRecord | None:
    same = [each for each in records if each.client == record.client and each.checks]
    wanted = (each for variant in (DEFAULT, EAGER) for each in same if each.variant == variant)
    return next(wanted, None)


def _compared(record: ClientRecord, reference: ClientRecord | None) -> ClientRecord:
    if reference is None or not record.checks or record.key == reference.key:
        return dataclasses.replace(record, against="", difference=None, agrees=None)
    eager = EAGER in (record.variant, reference.variant)
    tolerance = record.eager_tolerance if eager else record.tolerance
    difference = largest_difference(record.checks, reference.checks)
    return dataclasses.replace(
        record, against=reference.variant, difference=difference, agrees=difference <= (tolerance or 0.0)
    )


def largest_difference(checks: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]) -> float:
    """Return the largest difference of two runs' values, relative to the larger of both, or 0.1 if both are smaller."""
    if checks.keys() != others.keys() or any(len(checks[name]) != len(others[name]) for name in checks):
        # Stands for infinity, which JSON has no number for.
        return 1e9
    pairs = (pair for name in checks for pair in zip(checks[name], others[name], strict=True))
    return round(max((_difference(*pair) for pair in pairs), default=0.0), 6)


def _difference(one: float, other: float) -> float:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), abs(other), _SMALL)
    # By their text: NaN is not equal to itself, and a program may come to it in all variants alike.
    return 0.0 if str(one) == str(other) else 1e9


def failed(records: Sequence[ClientRecord]) -> bool:
    """Whether a client raised or came to other results with PyGraph, but not without."""
    fine = {each.client for each in records if each.variant == DEFAULT and not each.raised}
    ours = [each for each in records if each.variant.startswith("pygraph") and each.client in fine]
    return any(each.raised or each.agrees is False for each in ours)


def read_clients(file: Path) -> list[ClientRecord] | None:
    """Return the records of a result of `clients`; None if the file is another result. Raises BenchmarkError if it is none."""
    return client_records(read_result(file))


def client_records(content: Mapping[str, Any]) -> list[ClientRecord] | None:
    """Return the records of a result's content; None if it is none of `clients`."""
    if content["settings"].get("kind") != "clients":
        return None
    known = {each.name for each in dataclasses.fields(ClientRecord)}
    try:
        return [
            ClientRecord(**{name: value for name, value in each.items() if name in known})
            for each in content["records"]
        ]
    except TypeError as error:
        raise BenchmarkError(f"no result of `python -m benchmarks clients`: {error}") from error
