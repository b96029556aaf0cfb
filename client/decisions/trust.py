"""Which stored decisions this process uses, and which of those it validates first."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.decisions import rejection
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    from pygraphd.client.decisions.rejection import Rejection
    from pygraphd.schema.messages import Entry


class Trust(enum.StrEnum):
    """The treatment of decisions of other users and hosts: `PYGRAPH_TRUST`."""

    ALL = "all"
    """It is used."""
    VERIFY = "verify"
    """It is used, and validated on a few calls."""
    LOCAL = "local"
    """It is not used."""


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """Judges entries for a process on `host`; `max_age_s`: seconds after which an entry is measured anew; 0: no limit."""

    host: str
    trust: Trust = Trust.VERIFY
    refresh: bool = False
    max_age_s: float = 0.0

    def why_rejected(self, entry: Entry) -> Rejection | None:
        """Return why a stored decision is not used; None if it is."""
        return rejection.REFRESHED if self.refresh else self.why_not_trusted(entry)

    def why_not_trusted(self, entry: Entry) -> Rejection | None:
        """Return the same for a decision that another process takes while this one waits for it."""
        if self.trust is Trust.LOCAL and self._is_foreign(entry):
            return rejection.not_trusted(entry)
        age_s = time.time() - entry.measured_at if entry.measured_at is not None else 0.0
        if 0 < self.max_age_s < age_s:
            return rejection.too_old(age_s)
        return None if entry.decision.policy == POLICY_VERSION else rejection.other_policy(entry.decision)

    def must_validate(self, entry: Entry) -> bool:
        """Return whether a decision is timed on a few calls; one without a measured cost cannot be."""
        is_measured = entry.host_us is not None and entry.span_us is not None
        return self.trust is Trust.VERIFY and is_measured and self._is_foreign(entry)

    def _is_foreign(self, entry: Entry) -> bool:
        """Return whether another user or host has decided; rows of old databases do not say where."""
        return entry.uid not in {None, os.geteuid()} or entry.host not in {"", self.host}
