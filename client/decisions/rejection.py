"""The reasons not to use a stored decision as it is, for the summary and `pygraphd cache explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.schema.durations import human_duration
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode, because

if TYPE_CHECKING:
    from pygraphd.schema.messages import Decision, Entry


REFRESHED = Reason(ReasonCode.REFRESH_ASKED)
STORED_BY_SIZE = Reason(ReasonCode.STORED_BY_SIZE)


def not_trusted(entry: Entry) -> Reason:
    """Return why another user's or host's decision is not used under PYGRAPH_TRUST=local."""
    return because(ReasonCode.NOT_TRUSTED, _by(entry))


def other_policy(decision: Decision) -> Reason:
    """Return why a decision of another version of the policy is not used."""
    return because(ReasonCode.OTHER_POLICY, f"{decision.policy}, and this is {POLICY_VERSION}")


def unfinished(decision: Decision) -> Reason:
    """Return why a decision that is not final is not used."""
    return because(ReasonCode.NOT_FINAL, f"{decision.calls} calls")


def cost_differs(entry: Entry) -> Reason:
    """Return why a foreign decision is not used: its cost did not hold here."""
    return because(
        ReasonCode.COST_DIFFERS, f"{entry.decision.deployment} {entry.cost_us:.1f} us {_by(entry)}"
    )


def too_old(age_s: float) -> Reason:
    """Return why a decision is not used that was measured `age_s` seconds ago."""
    return because(ReasonCode.TOO_OLD, human_duration(age_s))


def _by(entry: Entry) -> str:
    who = "somebody" if entry.uid is None else f"uid {entry.uid}"
    return f"by {who} on {entry.host}" if entry.host else f"by {who}"
