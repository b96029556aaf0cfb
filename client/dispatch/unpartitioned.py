"""Graphs of which Inductor captures no part: whether all of one may be recorded, and how it is decided to be launched if not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pygraphd.client.decisions import rules
from pygraphd.schema import policy
from pygraphd.schema.reasons import ReasonCode, because

if TYPE_CHECKING:
    from pygraphd.client.backend.torch_private import CompiledFacts
    from pygraphd.schema.messages import Decision


def may_be_relocated(facts: CompiledFacts, partitions: int) -> bool:
    """Whether all of such a graph may be recorded, as far as its operators and devices go."""
    return facts.only_cuda and partitions == 1 and not facts.host_operators


def only_kernels(facts: CompiledFacts, *, is_state_known: bool = True) -> Decision:
    """Return the decision for it where nothing else is to be had, with the reason.

    `is_state_known`: whether it is known where its attention keeps random numbers.
    """
    if not torch.cuda.is_available():
        return rules.only_kernels(ReasonCode.NO_DEVICE)
    if not facts.on_cuda:
        return rules.only_kernels(ReasonCode.ON_CPU)
    if facts.host_operators:
        return rules.only_kernels(ReasonCode.CUSTOM_OPERATORS, ", ".join(facts.host_operators))
    if not facts.cudagraphs_asked:
        code = ReasonCode.NOT_ON_ONE_GPU if is_state_known else ReasonCode.RANDOM_STATE_UNKNOWN
        return rules.only_kernels(code)
    reason = because(ReasonCode.NOT_CAPTURED_BY_TORCH, facts.refusal or "it did not try")
    # A refusal because of another graph or a setting of the process may not come again.
    return policy.only_kernels(reason, final=facts.refused_for_good)
