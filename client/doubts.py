"""Why a decision that was known of a graph was not taken as it was, in words for the summary and `pygraphd cache explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
NOT_TRIED_THERE = Doubt("relocatable graphs can be tried here, and were not where that was decided")
BY_SIZE = Doubt("that was decided for each dynamic size apart")
OUT_OF_TREES = Doubt("it was decided for a forward and a backward that run otherwise here")


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


def drifted(deployment: Deployment, cost_us: float | None, *, overtaken: bool = False) -> Doubt:
    """Return what a deployed graph cost before it came to cost something else, or launches came to cost less."""
    if overtaken:
        return Doubt(f"{deployment}: launches have come to take less", deployment)
    before = "less or more" if cost_us is None else f"{cost_us:.1f} us"
    return Doubt(f"{deployment}: {before} when that was decided", deployment)


def _by(entry: Entry) -> str:
    who = "somebody" if entry.uid is None else f"uid {entry.uid}"
    return f"by {who} on {entry.host}" if entry.host else f"by {who}"
