"""The reasons not to use a stored decision as it is, for the summary and `pygraphd cache explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.durations import human_duration
from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode, because

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.schema.messages import Decision, Entry, Measurement


@dataclass(frozen=True, slots=True)
class Rejection:
    """A reason not to use a stored decision. If it is about the cost of a deployment, `costs` names that deployment."""

    why: Reason
    costs: Deployment | None = None

    def reason(self, measurements: Sequence[Measurement] = ()) -> Reason:
        """Return the reason, with the cost measured here if it is about a cost."""
        here = next((each.median_us for each in measurements if each.deployment is self.costs), None)
        if here is None:
            return self.why
        return because(self.why.code, f"{self.why.detail}, {here:.1f} us here")


REFRESHED = Rejection(Reason(ReasonCode.REFRESH_ASKED))
STORED_BY_SIZE = Rejection(Reason(ReasonCode.STORED_BY_SIZE))


def not_trusted(entry: Entry) -> Rejection:
    """Return why another user's or host's decision is not used under PYGRAPH_TRUST=local."""
    return Rejection(because(ReasonCode.NOT_TRUSTED, _by(entry)))


def other_policy(decision: Decision) -> Rejection:
    """Return why a decision of another version of the policy is not used."""
    return Rejection(because(ReasonCode.OTHER_POLICY, f"{decision.policy}, and this is {POLICY_VERSION}"))


def unfinished(decision: Decision) -> Rejection:
    """Return why a decision that is not final is not used."""
    return Rejection(because(ReasonCode.NOT_FINAL, f"{decision.calls} calls"))


def cost_differs(entry: Entry) -> Rejection:
    """Return why a foreign decision is not used: its cost did not hold here."""
    deployment = entry.decision.deployment
    return Rejection(
        because(ReasonCode.COST_DIFFERS, f"{deployment} {entry.cost_us:.1f} us {_by(entry)}"), deployment
    )


def too_old(age_s: float) -> Rejection:
    """Return why a decision is not used that was measured `age_s` seconds ago."""
    return Rejection(because(ReasonCode.TOO_OLD, human_duration(age_s)))


def _by(entry: Entry) -> str:
    who = "somebody" if entry.uid is None else f"uid {entry.uid}"
    return f"by {who} on {entry.host}" if entry.host else f"by {who}"
