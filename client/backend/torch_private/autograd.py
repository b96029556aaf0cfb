"""Finds the outputs that autograd saves for backwards."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend.torch_private.inductor import count_in_compilation, is_in_subgraph

if TYPE_CHECKING:
    from collections.abc import Callable

_SAVED = "pygraph saved: "
"""Prefix of the counter that a graph has if outputs of it are saved for a backward; their indices follow, as JSON."""


def keep_saved(graph: torch.fx.Graph) -> None:
    """Store with the graph that is being compiled which outputs of it are saved for its backward."""
    if is_in_subgraph():
        return
    told = graph.output_node().meta.get("desc") or ()  # of each output, what AOTAutograd has it for
    saved = [index for index, each in enumerate(told) if type(each).__name__.startswith("SavedForBackwards")]
    if saved:
        count_in_compilation(_SAVED + json.dumps(saved), 1)


def saved_outputs(compiled: Any) -> frozenset[int]:
    """Return the indices of outputs that are saved for the backward, as `keep_saved` stored them."""
    found = (
        name.removeprefix(_SAVED)
        for name in getattr(compiled, "counter_deltas", ())
        if name.startswith(_SAVED)
    )
    return frozenset(json.loads(next(found, "[]")))


def saves_by_hooks() -> bool:
    """Return whether saved-tensor hooks are set in this thread: a hook might free the storage of a saved tensor."""
    hooks, none = no_hooks_see_saved()
    return hooks() is not none


def no_hooks_see_saved() -> tuple[Callable[[], object], object]:
    """Return a C function and the value that it returns where no saved-tensor hooks are set."""
    return functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True), None
