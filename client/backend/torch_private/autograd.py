"""Finds the outputs that autograd saves for backwards, and the inputs of backwards whose memory kernels may use for other values."""

from __future__ import annotations

import functools
import importlib
import json
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend.torch_private.inductor import count_in_compilation, is_in_subgraph

if TYPE_CHECKING:
    from collections.abc import Callable

_SAVED = "pygraph saved: "
"""Prefix of the counter that a graph has if outputs of it are saved for a backward; their indices follow, as JSON."""

_DONATED = "pygraph donated: "
"""Prefix of a counter that each graph has; the indices of the donated inputs of a backward follow, as JSON."""


def keep_saved(graph: torch.fx.Graph) -> None:
    """Store with the graph that is being compiled which outputs of it are saved for its backward, and which inputs are donated to it."""
    if is_in_subgraph():
        return
    donated: Any = importlib.import_module("torch._inductor.utils").get_donated_idxs()
    count_in_compilation(_DONATED + json.dumps(donated or []), 1)
    told = graph.output_node().meta.get("desc") or ()  # of each output, what AOTAutograd has it for
    saved = [index for index, each in enumerate(told) if type(each).__name__.startswith("SavedForBackwards")]
    if saved:
        count_in_compilation(_SAVED + json.dumps(saved), 1)


def saved_outputs(compiled: Any) -> frozenset[int]:
    """Return the indices of outputs that are saved for the backward, as `keep_saved` stored them."""
    return _kept(compiled, _SAVED) or frozenset()


def donated_inputs(compiled: Any) -> frozenset[int] | None:
    """Return the indices of inputs that are donated to a backward, as `keep_saved` stored them; None if it did not."""
    return _kept(compiled, _DONATED)


def _kept(compiled: Any, prefix: str) -> frozenset[int] | None:
    names = getattr(compiled, "counter_deltas", ())
    found = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    indices = next(found, None)
    return None if indices is None else frozenset(json.loads(indices))


def saves_by_hooks() -> bool:
    """Return whether saved-tensor hooks are set in this thread: a hook might free the storage of a saved tensor."""
    hooks, none = no_hooks_see_saved()
    return hooks() is not none


def no_hooks_see_saved() -> tuple[Callable[[], object], object]:
    """Return a C function and the value that it returns where no saved-tensor hooks are set."""
    return functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True), None
