"""The patterns that keep a program's kernels out of CUDA graphs, found in its summary, with a remedy for each.

Each reason of the summary belongs to the first rule that fits. The remedies are those of `docs/limits.md`, and of NVIDIA's guide to CUDA
graphs in PyTorch where it has the pattern.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import reason_text
from pygraphd.schema.reasons import ReasonCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.cli.summaries import Summary

_BREAKS, _BETWEEN, _LEFT, _TORCH, _CALLS, _FAILED = (
    "graph_breaks",
    "between_graphs",
    "left_on_cpu",
    "left_to_torch",
    "fallbacks",
    "failures",
)
_DECIDED = "decisions"
_BRANCH = "generic_jump TensorVariable()"
"""Dynamo's reason for a graph break at an `if` or `while` on a tensor."""
_TOO_SELDOM = "called too few times"
_CALLS_BEFORE = 2
"""Calls of each size before it is decided by itself, by default: a program whose sizes are repeated has these, too."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern, with its remedy. It matches reasons of some `kinds` whose text matches `said`, and reasons with one of `codes`."""

    name: str
    kinds: frozenset[str]
    said: re.Pattern[str]
    remedy: str
    codes: frozenset[ReasonCode] = frozenset()

    def fits(self, kind: str, text: str, code: ReasonCode | None) -> bool:
        """Return whether a reason belongs here."""
        return code in self.codes or (kind in self.kinds and self.said.search(text) is not None)


@dataclass(frozen=True, slots=True)
class Finding:
    """A pattern that a program has: the reasons with their counts, the most frequent first, and the remedy."""

    name: str
    seen: tuple[tuple[str, int], ...]
    remedy: str


def _rule(name: str, kinds: str, said: str, remedy: str, *codes: ReasonCode) -> Rule:
    return Rule(name, frozenset(kinds.split()), re.compile(said), remedy, frozenset(codes))


RULES = (
    _rule(
        # First, or these would be among the other reasons, which the last rule takes.
        "expected", f"{_CALLS}", "^first call of a size|another process measured|^called from another thread|while it was measured|^measured anew", "",
        ReasonCode.LONGER_ON_GPU, ReasonCode.LONGER_ON_HOST, ReasonCode.NO_GAIN, ReasonCode.LEFT_TO_ANOTHER_PROCESS,
    ),
    _rule(
        # Before the graph breaks: Dynamo counts a branch on a tensor among these.
        "host reads", f"{_BREAKS} {_DECIDED}",
        r"^branch on the value|\.item\(|\.tolist\(|\.numpy\(|\.cpu\(|[Dd]ata[- ]dependent|Dynamic shape operator|to the host|host function",
        "keep the value on the GPU: torch.where instead of `if`, a tensor instead of .item(), .tolist() or .cpu(), and sizes that are known "
        "beforehand instead of nonzero() or a mask; or read it after the step. torch.cuda.set_sync_debug_mode(1) shows each read",
    ),
    _rule(
        "graph breaks", _BREAKS, "",
        "rewrite the line, or move it out of what is compiled (print and logging, too). TORCH_LOGS=graph_breaks shows each with its stack, and "
        "torch.compile(fullgraph=True) makes it an error",
    ),
    _rule(
        # Of what runs between graphs, the summary has the name of the operator alone.
        "unvouched operators", f"{_DECIDED} {_CALLS} {_BETWEEN}", r"nobody vouches|^\w+::\w+$",
        "if they do nothing on the host and depend on nothing but their arguments, set PYGRAPH_GRAPH_OPS to their names; for an operator of "
        "your own, allocate from PyTorch and launch on the current stream",
        ReasonCode.CUSTOM_OPERATORS,
    ),
    _rule(
        "sizes that are not repeated", _CALLS, "sizes|captured as often",
        "pad to a few sizes, or sort inputs into buckets; if there are few sizes, more than are decided at a time, raise PYGRAPH_SIZES",
        ReasonCode.DECIDED_BY_SIZE, ReasonCode.BOUND_REACHED,
    ),
    _rule(
        "CPU tensors", _LEFT, "",
        "make the tensor on the GPU (device=...), register it as a buffer, so that model.to() moves it, or pass a Python number; see docs/placement.md",
        ReasonCode.ON_CPU, ReasonCode.NOT_ON_ONE_GPU,
    ),
    _rule(
        "memory", f"{_CALLS} {_DECIDED} {_FAILED}", "[Oo]ut of memory|free memory",
        "leave room in the first steps: a smaller batch at first, or expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF; raise "
        "PYGRAPH_MEMORY if it is set",
        ReasonCode.NO_MEMORY_TO_MEASURE, ReasonCode.NO_MEMORY_TO_RECORD,
    ),
    _rule(
        "disturbed captures", f"{_CALLS} {_DECIDED}", "ended by another thread|being captured|capture of the user|user captures|history of the GPU",
        "during warm-up, no torch.cuda.synchronize(), event queries or pinned allocations in other threads, as DataLoader's pin_memory has; "
        "no capture or memory history of your own around compiled code",
        ReasonCode.CAPTURE_DISTURBED, ReasonCode.CANNOT_CAPTURE_NOW,
    ),
    _rule(
        "too few calls", "", "",
        "a graph is decided after about two dozen calls: run longer, or run again; the cache remembers",
        ReasonCode.TOO_FEW_CALLS,
    ),
    _rule(
        "results that differ", f"{_CALLS} {_DECIDED}", "differs|other results",
        "torch.use_deterministic_algorithms(True) if kernels add in an order of their own; else report it, with TORCH_LOGS=output_code",
        ReasonCode.RESULTS_DIFFER, ReasonCode.VERIFICATION_FAILED,
    ),
    _rule("no GPU", "", "", "see the checks of driver and torch", ReasonCode.NO_DEVICE),
    _rule(
        "collectives", _TORCH, "^it has collectives|^its collectives",
        "unset PYGRAPH_COLLECTIVES on all ranks, where it is 0; docs/limits.md lists collectives that cannot be captured, and what to do",
        ReasonCode.COLLECTIVES,
    ),
    _rule(
        "left to PyTorch", _TORCH, "",
        "unset PYGRAPH_RELOCATE, enable PyGraph before the forward is compiled, and see the checks of recording and helper",
    ),
    _rule("the daemon", _FAILED, "^daemon", "pygraphd start; without one, results wait in the spool"),
    _rule(
        "the bundle", _FAILED, "^bundle",
        "see that the folder named there, or that of PYGRAPH_BUNDLE, can be read and written, on a disk with room. Programs work without it; a "
        "file that is not valid is written anew by the next program that decides its graph",
    ),
    _rule(
        "other reasons", f"{_CALLS} {_DECIDED} {_FAILED}", "", "docs/limits.md lists what cannot be captured, and what to do",
    ),
)  # fmt: skip
"""The patterns, in the order in which a reason is compared. An empty regular expression fits any reason of its kinds."""


def findings(summary: Summary) -> list[Finding]:
    """Return the patterns that a summary shows, in the order of `RULES`, without the rule for expected reasons."""
    seen: dict[str, Counter[str]] = {rule.name: Counter() for rule in RULES}
    for kind, text, code, times in _reasons(summary):
        rule = next((rule for rule in RULES if rule.fits(kind, text, code)), RULES[-1])
        seen[rule.name][text] += times
    return [
        Finding(rule.name, tuple(seen[rule.name].most_common()), rule.remedy)
        for rule in RULES[1:]
        if seen[rule.name]
    ]


def _reasons(summary: Summary) -> Iterator[tuple[str, str, ReasonCode | None, int]]:
    """Yield kind, text, code and count of each reason that something ran as KERNELS or outside of a graph."""
    sized = [facts.whole for facts in summary.facts.values() if facts.whole]
    came_back = set(sized)
    for ran, times in Counter(summary.decisions).items():
        code = ran.reason.code
        # That sizes are decided apart keeps nothing out of graphs once one of them is repeated.
        if ran.deployment is Deployment.KERNELS and not (
            code is ReasonCode.DECIDED_BY_SIZE and ran.graph in came_back
        ):
            facts = summary.facts.get(ran.graph)
            where = f" ({facts.places[0]})" if facts is not None and facts.places else ""
            yield _DECIDED, reason_text(ran.reason, final=ran.final) + where, code, times
    for kind, reasons in summary.notes.items():
        for text, times in reasons.items():
            if _TOO_SELDOM not in text or times > len(sized) * _CALLS_BEFORE:
                yield kind, text.replace(_BRANCH, "branch on the value of a tensor"), None, times
