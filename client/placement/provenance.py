"""What the rules say of a graph: Inductor keeps it with what it compiles, so that the report has it from Inductor's caches, too.

It goes where Inductor counts what passes do; what was counted while a graph was compiled is saved with it. So the line of a
value is the one that it had when the graph was compiled.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pygraphd.client.common.report import Report

COUNTS = KNOWN, INPUTS = "placed", "placed_inputs"
"""What is counted, of each rule."""
NOT_APPLIED = "placement: not applied to a graph: a pass of the user's has its place, or Inductor's are off"
_OURS = "pygraph "
_RAN = f"{_OURS}rules"
_LEFT = f"{_OURS}left_on_cpu: "
_LINES = f"{_OURS}lines: "
_FAILED = f"{_OURS}failed: "


def keep_that_rules_ran() -> None:
    """Keep with what is being compiled that it was given to the rules at all."""
    torch_private.count_in_compilation(_RAN, 1)


def keep_failure(reason: str) -> None:
    """Keep with what is being compiled why it goes without some of the rules, for whoever finds it in the caches, too."""
    torch_private.count_in_compilation(_FAILED + reason, 1)


def keep(counts: Mapping[str, int], left: Iterable[str], lines: Mapping[str, Sequence[str]]) -> None:
    """Keep with what is being compiled how often the rules did what, why values are left, and the lines of what each graph sends."""
    for name, count in (+Counter(counts)).items():
        torch_private.count_in_compilation(_OURS + name, count)
    for reason in left:
        torch_private.count_in_compilation(_LEFT + reason, 1)
    for graph, of_values in lines.items():
        torch_private.count_in_compilation(_LINES + json.dumps([graph, *of_values]), 1)


def rules_ran(compiled: Any) -> bool:
    """Whether a compiled graph was given to the rules."""
    return _RAN in torch_private.counted_in_compilation(compiled)


def tell(compiled: Any, report: Report, note_lines: Callable[[str, Sequence[str]], None]) -> None:
    """Tell a report what was kept with a compiled graph, and `note_lines` of each graph in it the lines of what it sends."""
    for name, count in torch_private.counted_in_compilation(compiled).items():
        if name.startswith(_LEFT):
            report.leave_on_cpu(name.removeprefix(_LEFT), count)
        elif name.startswith(_FAILED):
            report.fail(name.removeprefix(_FAILED))
        elif name.startswith(_LINES):
            graph, *lines = json.loads(name.removeprefix(_LINES))
            note_lines(graph, lines)
        elif name.removeprefix(_OURS) in COUNTS and name.startswith(_OURS):
            report.count(**{name.removeprefix(_OURS): count})
