"""Finds the outputs that autograd saves for backwards, and the inputs of backwards whose memory kernels may use for other values."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraphd.client.backend.torch_private.inductor import count_in_compilation, is_in_subgraph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SAVED = "pygraph saved: "
"""Prefix of the counter that a graph has if outputs of it are saved for a backward; their indices follow, as JSON."""
_DONATED = "pygraph donated: "
"""Prefix of a counter that each graph has; the indices of the donated inputs of a backward follow, as JSON."""

_FUNCTION = re.compile(r"^ *def (\w+)\(.*\bargs\b", re.MULTILINE)
"""A function of generated code that takes a list of inputs."""
_NO_SUBGRAPHS = {"call", "benchmark_compiled_module"}
"""Names of functions that generated code always has, beside those of partitions. Functions with other names are of subgraphs."""
_INPUTS = re.compile(r"^ *def call\(.*\bargs\):\n *(.+) = args$", re.MULTILINE)
_SAME_MEMORY = re.compile(r"^ *(\w+) = (.*)# *(reuse|alias) *$", re.MULTILINE)
"""A line of generated code that gives the memory of one value to another, or a second name to it."""
_NAME = re.compile(r"\w+")
_ASSIGNMENT = re.compile(r"^ *(\(?\w+(?:, *\w*)*\)?) = (?!self\.partitions\[)(.+)$", re.MULTILINE)
"""A line of generated code that names a value, which may lie in the memory of any value that the line mentions."""
_NEW = re.compile(r"empty_strided\w*\(|extern_kernels\.\w+\(")
"""The beginnings of calls that return new memory, beside operators whose schemas say so."""
_OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)\(")
_RETURN = re.compile(r"^ *return \((.*)\)$", re.MULTILINE)
_SIGNATURE = re.compile(r"^ *def forward\(self, .*$", re.MULTILINE)
_SIZED = re.compile(r'(\w+): "\w+\[([\d, ]*)\]')
"""A tensor of known size in the signature of a printed graph."""
_AOT_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"
"""The module of the dispatch mode that AOTAutograd uses at first calls."""
_POOL = "alloc_from_pool("
"""Found in code whose memory is planned in another way, without lines as above."""


def keep_saved(graph: torch.fx.Graph) -> None:
    """Store with the graph that is being compiled which outputs of it are saved for its backward, and which inputs are donated to it."""
    if is_in_subgraph():
        return
    donated: Any = importlib.import_module("torch._inductor.utils").get_donated_idxs()
    # Also where there are none: without the counter this pass has not run, and any input may be written.
    count_in_compilation(_DONATED + json.dumps(donated or []), 1)
    descriptions = graph.output_node().meta.get("desc") or ()  # of AOTAutograd, one for each output
    saved = [
        index
        for index, each in enumerate(descriptions)
        # By the beginning of the name: there is a second class, for tensors whose version is not checked.
        if type(each).__name__.startswith("SavedForBackwards")
    ]
    if saved:
        count_in_compilation(_SAVED + json.dumps(saved), 1)


def returned_outputs() -> int | None:
    """Return how many outputs of the forward that AOTAutograd compiles are the program's: those after them are saved for the backward.

    Two programs may have the same forward graph and differ in that, so it has to be part of the keys of Inductor's caches. None for a
    backward, and before AOTAutograd has traced the graph.
    """
    context = torch._guards.TracingContext.try_get()
    # Set while a graph is compiled. Before, the metadata may be of an earlier graph of the same context, and on a hit of AOTAutograd's
    # cache it is not set: keys that held it would differ from process to process.
    name = getattr(context, "aot_graph_name", None)
    if not name or name[0].endswith("backward"):
        return None
    return getattr(context.fw_metadata, "num_forward", None)


def saved_outputs(compiled: Any) -> frozenset[int]:
    """Return the indices of outputs that are saved for the backward, as `keep_saved` stored them."""
    return _kept(compiled, _SAVED) or frozenset()


def donated_inputs(compiled: Any, code: str) -> frozenset[int] | None:
    """Return the indices of inputs that are donated to a backward and whose memory its code uses again; None if `keep_saved` was not called."""
    donated = _kept(compiled, _DONATED)
    return reused_inputs(code, donated) if donated else donated


def reused_inputs(code: str, donated: frozenset[int]) -> frozenset[int]:
    """Return those of the donated inputs whose memory generated code gives to other values; all of them if the code is not understood."""
    names = _inputs(code)
    if len(names) <= max(donated):
        return donated
    same = [(made, of, comment) for made, of, comment in _SAME_MEMORY.findall(code)]
    inputs = _followed(names, [(made, of) for made, of, _ in same])
    reused = set[str]().union(*(inputs[made] for made, _, comment in same if comment == "reuse"))
    return frozenset(index for index in donated if names[index] in reused)


def returned_sizes(code: str, text: str) -> frozenset[int] | None:
    """Return the numbers of elements of those inputs of a backward that its outputs may lie in; None: not known. `text` is the printed graph."""
    names, given, signature = _inputs(code), _INPUTS.search(code), _SIGNATURE.search(text)
    returned = _RETURN.search(code, given.end()) if names and given is not None else None
    if signature is None or returned is None:
        return None
    made_of = [
        (each, of)
        for made, of in _ASSIGNMENT.findall(code)
        if not _is_new(of)
        for each in _NAME.findall(made)
    ]
    inputs = _followed(names, made_of)
    found = set[str]().union(*(inputs.get(each, ()) for each in _NAME.findall(returned[1])))
    sizes = {
        name: math.prod(map(int, filter(None, size.split(", "))))
        for name, size in _SIZED.findall(signature[0])
    }
    return frozenset(sizes[name] for name in found) if found <= sizes.keys() else None


def _is_new(expression: str) -> bool:
    called = _OPERATOR.match(expression)
    return _NEW.match(expression) is not None or (called is not None and _returns_new(called[1], called[2]))


@functools.cache
def _returns_new(name: str, overload: str) -> bool:
    """Return whether an operator of PyTorch's is known to return no alias of an argument. The schemas of some, as `_unsafe_view`, leave it out."""
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if operator is None or not (name.endswith("_backward") or torch.Tag.core in operator.tags):
        return False
    return all(each.alias_info is None for each in operator._schema.returns)


def _inputs(code: str) -> list[str]:
    """Return the names of the inputs in generated code; none if the code is not understood."""
    functions, given = set(_FUNCTION.findall(code)), _INPUTS.search(code)
    others = {each for each in functions if not each.startswith("partition_")} - _NO_SUBGRAPHS
    if given is None or others or _POOL in code:
        return []
    return [each.strip() for each in given[1].strip(", ").split(",")]


def _followed(names: Sequence[str], made_of: Sequence[tuple[str, str]]) -> dict[str, set[str]]:
    """Return for each value the inputs that it may lie in; `made_of` has pairs of a value and the code that it is made of."""
    inputs: dict[str, set[str]] = {name: {name} for name in names}
    sources = [(made, _NAME.findall(of)) for made, of in made_of]
    before = 0
    # Again until nothing is added: partitions stand before the code that calls them.
    while before < (before := sum(map(len, inputs.values()))):
        for made, of in sources:
            inputs.setdefault(made, set()).update(*(inputs.get(each, ()) for each in of))
    return inputs


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
    # The argument is `ignore_is_tracing`.
    return functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True), None


def no_dispatch_modes() -> tuple[Callable[[], object], object]:
    """Return a C function and the value that it returns where no dispatch mode, as of selective checkpointing, waits to see operators."""
    return torch._C._len_torch_dispatch_stack, 0


def has_dispatch_modes() -> bool:
    """Return whether a dispatch mode of the program is active in this thread.

    AOTAutograd's own mode, which checks custom operators, is active at the first call of each graph, and at no later call.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(each).__module__ != _AOT_WRAPPERS for each in _get_current_dispatch_mode_stack())
