"""Graphs of which Inductor captures no part: whether all of one may be recorded, and how it is decided to be launched if not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pygraphd.client.decisions import rules

if TYPE_CHECKING:
    from pygraphd.client.backend.torch_private import CompiledFacts
    from pygraphd.schema.messages import Decision


def may_be_relocated(facts: CompiledFacts, partitions: int) -> bool:
    """Whether all of such a graph may be recorded, as far as its operators and devices go."""
    return facts.only_cuda and partitions == 1 and not facts.host_operators


def only_launch(facts: CompiledFacts, *, is_state_known: bool = True) -> Decision:
    """Return the decision for it where nothing else is to be had, with the reason.

    `is_state_known`: whether it is known where its attention keeps random numbers.
    """
    if not torch.cuda.is_available():
        return rules.only_launch(rules.NO_DEVICE)
    if not facts.on_cuda:
        return rules.only_launch(rules.ON_THE_CPU)
    if facts.host_operators:
        return rules.only_launch(rules.one_line(rules.HOST_OPERATORS + ", ".join(facts.host_operators)))
    if not facts.cudagraphs_asked:
        return rules.only_launch(rules.NOT_WHOLE if is_state_known else rules.STATE_UNKNOWN)
    reason = rules.one_line(f"{rules.NOT_CAPTURED}{facts.refusal or 'it did not try'}")
    # What another graph or a setting of the process has led to may be otherwise next time.
    return rules.only_launch(reason) if facts.refused_for_good else rules.not_measured(reason, 0)
