"""Judges which stored decisions this process uses, and which of these it validates."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.durations import human_duration
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode, because
from pygraphd.schema.shipped import SHIPPED

if TYPE_CHECKING:
    from pygraphd.schema.messages import Entry


class Trust(enum.StrEnum):
    """How decisions of other users and hosts are treated, as `PYGRAPH_TRUST` sets it."""

    ALL = "all"
    """They are used."""
    VALIDATE = "validate"
    """They are used, and validated on a few calls."""
    LOCAL = "local"
    """They are not used."""


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """Judges entries for a process on `host`; `max_age_s`: seconds after which an entry is measured anew; 0: no limit."""

    host: str
    trust: Trust = Trust.VALIDATE
    refresh: bool = False
    max_age_s: float = 0.0

    def why_rejected(self, entry: Entry) -> Reason | None:
        """Return why a stored decision is not used; None if it is used."""
        return Reason(ReasonCode.REFRESH_ASKED) if self.refresh else self.why_not_trusted(entry)

    def why_not_trusted(self, entry: Entry) -> Reason | None:
        """Return why a stored decision is not used, whatever PYGRAPH_REFRESH says; None if it is used."""
        if self.trust is Trust.LOCAL and self._is_foreign(entry):
            return because(ReasonCode.NOT_TRUSTED, taken_by(entry))
        age_s = time.time() - entry.measured_at if entry.measured_at is not None else 0.0
        # Shipped decisions are as old as the package, and are validated in each process.
        if 0 < self.max_age_s < age_s and not entry.host.startswith(SHIPPED):
            return because(ReasonCode.TOO_OLD, human_duration(age_s))
        if (version := entry.decision.policy) != POLICY_VERSION:
            return because(ReasonCode.OTHER_POLICY, f"{version}, and this is {POLICY_VERSION}")
        return None

    def must_validate(self, entry: Entry) -> bool:
        """Return whether a decision is validated on a few calls, if it has a measured cost."""
        return self.trust is Trust.VALIDATE and self._is_foreign(entry)

    def _is_foreign(self, entry: Entry) -> bool:
        """Return whether another user or host took the decision. Rows of old databases name no host; they count as of this host."""
        return entry.uid not in {None, os.geteuid()} or entry.host not in {"", self.host}


def taken_by(entry: Entry) -> str:
    """Return who took a decision, as text."""
    who = "somebody" if entry.uid is None else f"uid {entry.uid}"
    return f"by {who} on {entry.host}" if entry.host else f"by {who}"
