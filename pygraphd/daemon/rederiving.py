"""Decisions derived anew by the policy of this version from stored measurements, for `cache rederive` and at the daemon's start.

Has the request and the answer, as daemon and command exchange them, and the outcome for one entry. Nothing is measured. Only
measurements of one record are compared: those that the entry's decision rests on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pygraphd.schema import policy
from pygraphd.schema.checks import check_bool, check_int, check_text
from pygraphd.schema.messages import Decision, Deployment, Measurement
from pygraphd.schema.reasons import MAX_DETAIL, Reason, ReasonCode

NOT_VALID = "what is stored of it is not valid"

_Key = TypeVar("_Key", str, tuple[Deployment, Deployment])

Row = Mapping[str, Any]
"""Column values by name, of `pygraphd.daemon.tables`."""


@dataclass(frozen=True, slots=True)
class RederiveRequest:
    """Selects all entries whose decision rests on measurements."""

    dry_run: bool = False

    def __post_init__(self) -> None:
        check_bool("dry_run", self.dry_run)

    def as_json(self) -> dict[str, object]:
        """Return the body of `REDERIVE_PATH`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Changed:
    """The number of entries whose deployment changed from `before` to `after`."""

    before: Deployment
    after: Deployment
    entries: int

    def __post_init__(self) -> None:
        check_int("entries", self.entries, maximum=2**62)


@dataclass(frozen=True, slots=True)
class Kept:
    """The number of entries that keep their decision, for one reason."""

    reason: str
    entries: int

    def __post_init__(self) -> None:
        check_text("reason", self.reason, maximum=MAX_DETAIL)
        check_int("entries", self.entries, maximum=2**62)


@dataclass(frozen=True, slots=True)
class RederiveAnswer:
    """The outcome of `entries` entries, or with `dry_run` its forecast: unchanged, renewed, changed or kept.

    `renewed` ones keep their deployment, but not their reason, policy or finality. `unmeasured` ones rest on no measurement, are not
    counted among `entries`, and stay as they are.
    """

    policy: int
    entries: int
    unchanged: int
    renewed: int
    changed: tuple[Changed, ...]
    kept: tuple[Kept, ...]
    unmeasured: int
    dry_run: bool

    def __post_init__(self) -> None:
        for name in ("policy", "entries", "unchanged", "renewed", "unmeasured"):
            check_int(name, getattr(self, name), maximum=2**62)
        check_bool("dry_run", self.dry_run)

    def as_json(self) -> dict[str, object]:
        """Return the answer as JSON has it."""
        return {"schema": 1, **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for one entry: `after` replaces `before`, unless `kept` has a reason to keep `before`."""

    before: Decision | None
    after: Decision | None
    kept: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether the decision has changed and has to be written."""
        return self.kept is None and self.after != self.before


def rederive(stored: Row, measured: Sequence[Row]) -> Outcome:
    """Return the outcome for an entry: `stored` is its row, `measured` the measurements that its decision rests on."""
    try:
        before, after = decision_of(stored), policy.decide([measurement_of(row) for row in measured])
    except ValueError:  # another program's deployment, or a time that is none
        return Outcome(None, None, NOT_VALID)
    if before.final and after.reason.code is ReasonCode.TOO_FEW_CALLS:
        # That a policy needs more is no reason to give up what an earlier one, or a longer program, has decided.
        return Outcome(before, after, str(after.reason))
    # The policy knows no calls: these are what the program has counted.
    return Outcome(before, dataclasses.replace(after, calls=before.calls))


def decision_of(row: Row) -> Decision:
    """Return the decision in a row; raises ValueError for one of another program."""
    deployment, (reason, against) = Deployment(row["deployment"]), reasons_of(row)
    return Decision(deployment, reason, row["policy"], bool(row["final"]), row["calls"], against)


def reasons_of(row: Row) -> tuple[Reason, Reason]:
    """Return why the deployment of a decision's row was chosen, and why the other was not."""
    return (
        Reason(ReasonCode(row["reason"]), row["detail"]),
        Reason(ReasonCode(row["against"]), row["against_detail"]),
    )


def measurement_of(row: Row) -> Measurement:
    """Return the measurement in a row; raises ValueError for another program's."""
    values = {field.name: row[field.name] for field in dataclasses.fields(Measurement)}
    return Measurement(**{**values, "deployment": Deployment(row["deployment"])})


def summary(outcomes: Sequence[Outcome], unmeasured: int, *, dry_run: bool) -> RederiveAnswer:
    """Return the answer with the counts of all outcomes, the most frequent first."""
    kept = Counter(outcome.kept for outcome in outcomes if outcome.kept is not None)
    moves = Counter(
        (outcome.before.deployment, outcome.after.deployment)
        for outcome in outcomes
        if outcome.is_new and outcome.before is not None and outcome.after is not None
    )
    changed = tuple(Changed(*move, count) for move, count in _ranked(moves) if move[0] is not move[1])
    return RederiveAnswer(
        policy=policy.POLICY_VERSION,
        entries=len(outcomes),
        unchanged=len(outcomes) - kept.total() - moves.total(),
        renewed=moves.total() - sum(each.entries for each in changed),
        changed=changed,
        kept=tuple(Kept(reason, count) for reason, count in _ranked(kept)),
        unmeasured=unmeasured,
        dry_run=dry_run,
    )


def _ranked(counts: Counter[_Key]) -> list[tuple[_Key, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
