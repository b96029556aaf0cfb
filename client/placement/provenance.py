"""The results of the placement passes, saved with the compiled code, so that the report also has them on hits of Inductor's caches.

They are stored as counters of Inductor's: those that a compilation increments are saved with its code. So the source line of a value
is that at the time of compilation.
"""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend import torch_private

if TYPE_CHECKING:
    import torch

    from pygraphd.client.common.report import Report
    from pygraphd.client.placement.fx_utils import PassResult

COUNTS = KNOWN, INPUTS = "placed", "placed_inputs"
"""The names of the counters in the summary, one for each pass."""
NOT_APPLIED = "placement: not applied to a graph: a user's pass has replaced it, or Inductor's passes are off"
_OURS = "pygraph "
RAN = f"{_OURS}rules"
"""The name of a counter that says that the passes ran."""
FAILED = f"{_OURS}failed: "
"""The beginning of the name of a counter that says why a pass failed."""
_LEFT = f"{_OURS}left_on_cpu: "
_MODULE = f"{_OURS}module: "


def save_module(graph: torch.fx.Graph) -> None:
    """Save with the current compilation the path of the innermost module that all of a graph is in, as Dynamo names it."""
    # AOTAutograd gives the second one to nodes of a backward, and takes it from nodes of the forward.
    names = ("nn_module_stack", "fwd_nn_module_stack")
    stacks = (next(filter(None, map(node.meta.get, names)), None) for node in graph.nodes)
    # With slashes `commonpath` compares whole names: `layer.1` and `layer.10` have `layer` in common.
    if paths := [[*stack.values()][-1][0].replace(".", "/") for stack in stacks if stack]:
        torch_private.count_in_compilation(_MODULE + os.path.commonpath(paths), 1)


def module_of(compiled: Any) -> str:
    """Return what `save_module` has saved, with "/" for "."; empty if it is not known."""
    names = torch_private.counted_in_compilation(compiled)
    return next((name.removeprefix(_MODULE) for name in names if name.startswith(_MODULE)), "")


def save(counter: str, result: PassResult) -> None:
    """Save the result of a pass with the current compilation; `counter` is one of `COUNTS`."""
    if result.uses:
        torch_private.count_in_compilation(_OURS + counter, result.uses)
    for reason in result.left:
        # Text goes into the names, since counters hold numbers alone.
        torch_private.count_in_compilation(_LEFT + reason, 1)


def report_results(compiled: Any, report: Report, *, expected: bool = False) -> None:
    """Report the results saved with a compiled graph; that there are none is a failure if they are `expected`."""
    results = torch_private.counted_in_compilation(compiled)
    if expected and RAN not in results:
        report.count_failure(NOT_APPLIED)
    for name, count in results.items():
        if name.startswith(_LEFT):
            report.note("left_on_cpu", name.removeprefix(_LEFT), count)
        elif name.startswith(FAILED):
            report.count_failure(name.removeprefix(FAILED))
        elif name.removeprefix(_OURS) in COUNTS and name.startswith(_OURS):
            report.count(**{name.removeprefix(_OURS): count})
