"""Graphs of which Inductor captures no part: whether all of one may be recorded, and how it is decided to be launched if not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pygraphd.client import policy

if TYPE_CHECKING:
    from pygraphd.client._torch import CompiledFacts
    from pygraphd.schema.messages import Decision


def may_be_relocated(facts: CompiledFacts, partitions: int) -> bool:
    """Whether all of such a graph may be recorded."""
    return facts.only_cuda and facts.state is not None and partitions == 1 and not facts.host_operators


def only_launch(facts: CompiledFacts) -> Decision:
    """Return the decision for it where nothing else is to be had, with the reason."""
    if not torch.cuda.is_available():
        return policy.only_launch(policy.NO_DEVICE)
    if not facts.on_cuda:
        return policy.only_launch(policy.ON_THE_CPU)
    if facts.host_operators:
        return policy.only_launch(policy.one_line(policy.HOST_OPERATORS + ", ".join(facts.host_operators)))
    if not facts.cudagraphs_asked:
        return policy.only_launch(policy.NOT_WHOLE if facts.state is not None else policy.STATE_UNKNOWN)
    reason = policy.one_line(f"{policy.NOT_CAPTURED}{facts.refusal or 'it did not try'}")
    # What another graph or a setting of the process has led to may be otherwise next time.
    return policy.only_launch(reason) if facts.refused_for_good else policy.not_measured(reason, 0)
