"""Why a decision that was known of a graph was not taken as it was, in words for the summary and `pygraphd cache explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.durations import human_duration
from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.schema.messages import Decision, Entry, Measurement


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason. Where it is a deployment's cost that is in doubt, what that is here is added as soon as it is measured."""

    text: str
    costs: Deployment | None = None

    def told(self, measurements: Sequence[Measurement] = ()) -> str:
        """Return the reason, with what was measured since of what it is about."""
        here = next((each.median_us for each in measurements if each.deployment is self.costs), None)
        return self.text if here is None else f"{self.text}, measured {here:.1f} us here"


REFRESHED = Doubt("PYGRAPH_REFRESH asks to measure anew")
NOT_OFFERED = Doubt("what was decided is not to be had here")
BY_SIZE = Doubt("that was decided for each dynamic size apart")


def not_trusted(entry: Entry) -> Doubt:
    """Return why what somebody else has decided is not used."""
    return Doubt(f"decided {_by(entry)}, and PYGRAPH_TRUST=local")


def other_policy(decision: Decision) -> Doubt:
    """Return why what another version of the rule has decided is not used."""
    return Doubt(f"decided by policy {decision.policy}, and this is policy {POLICY_VERSION}")


def unfinished(decision: Decision) -> Doubt:
    """Return why what is not final is not used."""
    return Doubt(f"not final, after {decision.calls} calls")


def disputed(entry: Entry) -> Doubt:
    """Return what somebody else has claimed, and what does not hold here."""
    deployment = entry.decision.deployment
    return Doubt(f"{deployment}: claimed {entry.cost_us:.1f} us {_by(entry)}", deployment)


def too_old(age_s: float) -> Doubt:
    """Return why what was measured long ago is not used."""
    return Doubt(f"measured {human_duration(age_s)} ago, and PYGRAPH_MAX_AGE is less")


def _by(entry: Entry) -> str:
    who = "somebody" if entry.uid is None else f"uid {entry.uid}"
    return f"by {who} on {entry.host}" if entry.host else f"by {who}"
