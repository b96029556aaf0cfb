"""Has Inductor split graphs around host operators and CPU work, in modes in which it would not split them."""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import vouched_operators
from pygraphd.client.backend.torch_private import passes
from pygraphd.client.backend.torch_private.inductor import Runnable, inductor_config
from pygraphd.client.backend.torch_private.operators import host_operators, overloads_of
from pygraphd.client.backend.torch_private.passes import current_pass, is_added, is_for_export

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def graphs_are_split() -> bool:
    """Return whether the graph that is being compiled will be split around code that cannot be captured."""
    config = inductor_config()
    is_split_by_us = passes.split_by and not config.memory_planning
    return bool(config.graph_partition and (config.triton.cudagraphs or is_split_by_us))


class _Splitting(threading.local):
    """The splitting of the graph for which this thread generates code."""

    operators: frozenset[str] = frozenset()
    """The host operators that the graph is split around, each as `namespace::operator`."""
    is_on = False
    """Whether Inductor is to split the graph as it does in modes with CUDA graphs."""
    is_reordering = False
    """Whether Inductor moves nodes that it splits around, to have fewer partitions."""


_splitting = _Splitting()

_SPLIT_ON = "cuda"
"""The device type of graphs that are split."""


def split_graphs(vouched: frozenset[str]) -> Callable[[], None]:
    """Have Inductor split graphs in every mode around host operators and CPU work; return a function that ends that.

    Inductor splits graphs only in modes with CUDA graphs, or if a wrapper of partitions is set. So a wrapper is pretended while a thread
    generates code for a graph that is to be split. The code of other graphs, and their keys in Inductor's caches, stay as they are. The
    user vouches for the operators in `vouched`.
    """
    module: Any = importlib.import_module("torch._inductor.custom_graph_pass")
    code = str(module.get_hash_for_files((*passes.FILES, vouched_operators.__file__)))
    # First: from here on, keys in Inductor's caches tell split graphs from the others.
    before, passes.split_by = passes.split_by, (code, *sorted(vouched))
    scheduler: Any = importlib.import_module("torch._inductor.scheduler").Scheduler
    undo = [
        _around(importlib.import_module("torch._inductor.graph").GraphLowering, "codegen", _splitting_codegen(vouched)),
        _around(scheduler, "should_partition", _split_here),
        _around(scheduler, "reorder_for_partition_with_simple_dependency", _reorder),
        _pretend_to_wrap(),
    ]  # fmt: skip

    def stop() -> None:
        passes.split_by = before
        for each in undo:
            each()

    return stop


def _around(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method by `around(original, self, ...)`; return a function that undoes it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(self: Any, *arguments: Any, **named: Any) -> Any:
        return around(original, self, *arguments, **named)

    def stop() -> None:
        if getattr(owner, name) is hooked:
            setattr(owner, name, original)

    setattr(owner, name, hooked)
    return stop


def _splitting_codegen(vouched: frozenset[str]) -> Callable[..., Any]:
    def codegen(original: Callable[..., Any], lowering: Any, *arguments: Any, **named: Any) -> Any:
        outer = _splitting.operators, _splitting.is_on
        _splitting.operators, _splitting.is_on = _split(lowering, vouched)
        try:
            return original(lowering, *arguments, **named)
        finally:
            _splitting.operators, _splitting.is_on = outer

    return codegen


def _split(lowering: Any, vouched: frozenset[str]) -> tuple[frozenset[str], bool]:
    """Return the values of `_Splitting` for a graph: it is split if it has host operators, or does not run on GPUs alone."""
    try:
        if inductor_config().memory_planning:
            return frozenset(), False  # Inductor plans memory across partitions, and computes wrong values
        if not inductor_config().graph_partition or _SPLIT_ON not in lowering.device_types:
            return frozenset(), False
        if not is_added(current_pass()) or is_for_export():  # else its cache key would not differ
            return frozenset(), False
        overloads = {*overloads_of(lowering.orig_gm)}
        if any(space == vouched_operators.STREAMS for space, _, _ in overloads):
            return frozenset(), False  # it is not captured
        operators = frozenset(host_operators(overloads, vouched))
        return operators, bool(operators) or len({*lowering.device_types} - {"meta"}) > 1
    except Exception:  # noqa: BLE001 - within the user's compilation: the graph stays whole
        return frozenset(), False


def _split_here(
    original: Callable[..., Any], scheduler: Any, node: Any, *arguments: Any, **named: Any
) -> Any:
    """Stand in for `Scheduler.should_partition`, which returns a truth value up to torch 2.12, and a reason later."""
    # Where nodes are moved, outputs would go to the end of the graph, and keep their call's others alive.
    if not _splitting.is_reordering:
        node = _call_of(scheduler, node)
    operator = getattr(getattr(node, "node", None), "op_overload", None)
    name = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else None
    if name in _splitting.operators:
        returns = str(getattr(original, "__annotations__", {}).get("return", ""))
        return True if "bool" in returns else f"runs at each call: {name}"
    return original(scheduler, node, *arguments, **named)


def _call_of(scheduler: Any, node: Any) -> Any:
    """Return the node of the call of which a node is one of several outputs; other nodes as they are.

    Apart from its call, an output would be in the next partition, which then were given all of them as a tuple.
    """
    try:
        output = node.node
        if isinstance(output, importlib.import_module("torch._inductor.ir").MultiOutput):
            return scheduler.name_to_buf[output.inputs[0].get_name()].defining_op or node
    except Exception:  # noqa: BLE001 - within the user's compilation: that partition is not recorded
        pass
    return node


def _reorder(original: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> Any:
    outer, _splitting.is_reordering = _splitting.is_reordering, True
    try:
        return original(scheduler, *arguments, **named)
    finally:
        _splitting.is_reordering = outer


def _pretend_to_wrap() -> Callable[[], None]:
    """Have Inductor see a wrapper of partitions while a graph is to be split."""
    kind: Any = importlib.import_module("torch._inductor.utils").CUDAGraphWrapper
    default = vars(kind)["wrapper"]

    def get(self: Any) -> Any:
        return vars(self).get("wrapper", default) or (_wrapped_elsewhere if _splitting.is_on else None)

    def put(self: Any, value: Any) -> None:
        vars(self)["wrapper"] = value

    ours = property(get, put)

    def stop() -> None:
        if vars(kind)["wrapper"] is ours:
            kind.wrapper = default

    kind.wrapper = ours
    return stop


def _wrapped_elsewhere(partition: Runnable, metadata: object) -> Runnable:
    return partition  # never called: PyGraph wraps partitions after `post_compile`


def somebody_wraps_partitions() -> bool:
    """Return whether a wrapper of partitions is set, by the user or by PyGraph."""
    utils: Any = importlib.import_module("torch._inductor.utils")
    return utils._unstable_customized_partition_wrapper.wrapper is not None


def others_capture() -> bool:
    """Return whether the program captures compiled graphs itself: by a wrapper of partitions, or from torch 2.13 on by a policy."""
    config: Any = inductor_config()
    # PyGraph's own wrapper does not show here: it is pretended only while code is generated.
    is_wrapped = config.graph_partition and somebody_wraps_partitions()
    return bool(is_wrapped) or getattr(config, "cudagraph_policy", None) is not None


def split_partitions(compiled: Any) -> list[Runnable]:
    """Return the list of a compiled graph's partitions, whose items may be replaced."""
    partitions: list[Runnable] = compiled.compiled_fn_runner.partitions
    return partitions


def is_split_around(source: str, operators: Sequence[str]) -> bool:
    """Return whether generated code calls all of the operators between its partitions, and none of them within a partition."""
    between: set[str] = set()
    elsewhere: set[str] = set()
    for function, line in _code(source):
        called = between if function.startswith("class Runner") else elsewhere
        called.update(f"{a}::{b}" for a, b in _CALL.findall(line))
    return between.issuperset(operators) and elsewhere.isdisjoint(operators)


def without_kernels(source: str) -> str:
    """Return generated code without the sources of its kernels, which are most of it: what is left calls them."""
    return _KERNEL.sub("", source)


def collectives_in(
    source: str, operators: Iterable[str], partitions: int
) -> tuple[frozenset[tuple[str, str]], ...]:
    """Return for each partition the collectives that its generated code calls, as (`namespace::operator`, name of the group).

    `operators` are those of the graph. If generated code calls its collectives where this does not read them, each partition is said to
    call unread code: in C++ (`cpp_wrapper`), or in a function of a nested region, which any partition may call.
    """
    if not (named := sorted(filter(_is_collective, operators))):
        return (frozenset[tuple[str, str]](),) * partitions  # at once, as for nearly all graphs
    found: dict[str, set[tuple[str, str]]] = {}
    for function, line in _code(source):
        for namespace, name in _CALL.findall(line):
            if _is_collective(operator := f"{namespace}::{name}"):
                # The group is the last text among the arguments.
                group = [*_TEXT.findall(line), ""][-2:][0]
                found.setdefault(function, set()).add((operator, group))
    has_partitions = _has_partitions(source)
    if not found or (has_partitions and not all(map(_READ.match, found))):
        return (frozenset({(f"code that is not read ({named[0]})", "")}),) * partitions
    if not has_partitions:
        return (frozenset().union(*found.values()),) * partitions
    return tuple(frozenset(found.get(f"def partition_{each}", ())) for each in range(partitions))


def _is_collective(operator: str) -> bool:
    namespace, _, name = operator.partition("::")
    return namespace in _OF_COLLECTIVES and not name.startswith("wait_")


def launches_in(source: str, partitions: int) -> tuple[tuple[int, ...], int]:
    """Return how many kernels generated code calls, one for each call of a library: in each partition, and between them."""
    found = Counter(function for function, line in _code(source) if _LAUNCH.search(line))
    if not _has_partitions(source) or f"\ndef partition_{partitions}(" in source:
        return (found.total(),) * partitions, 0
    return tuple(found[f"def partition_{each}"] for each in range(partitions)), found["class Runner:"]


def reads_sizes(source: str) -> bool:
    """Return whether generated code that would be captured reads a size or stride off a tensor, as for the backward of a jagged tensor.

    Nothing among the inputs of a call would tell its recording from that of another size. Partitions are given sizes as integers.
    """
    function = "def partition_" if _has_partitions(source) else ""
    return any(each.startswith(function) and _SIZE.match(line) is not None for each, line in _code(source))


def _code(source: str) -> Iterator[tuple[str, str]]:
    """Yield each line of generated code that is no comment, with the beginning of the function or class that it is in."""
    function = ""
    for line in source.splitlines():
        if line[:1].strip():
            function = line.partition("(")[0]
        if not line.lstrip().startswith("#"):
            yield function, line


def _has_partitions(source: str) -> bool:
    return "\ndef partition_0(" in f"\n{source}"


_READ = re.compile(r"def partition_\d+$|class Runner")
"""Functions and classes of generated code that are a partition, or run between partitions."""
_OF_COLLECTIVES = frozenset({"_c10d_functional", "_dtensor", "c10d", "c10d_functional", "symm_mem"})
"""Namespaces of the operators that wait for other ranks."""
_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.\w+)?\(")
_KERNEL = re.compile(r"^\w+ = async_compile\.[^\n]*'''$.*?^'''[^\n]*$", re.MULTILINE | re.DOTALL)
_LAUNCH = re.compile(
    r"\.run\(.*\bstream|\bextern_kernels\.\w+\(|\baten\.\w+_\(|\.copy_\("
    r"|\btorch\.ops\.\w+\.(?!wait_|view_as_)\w+(?:\.\w+)?\("
)
_TEXT = re.compile(r"'([^']*)'")
_SIZE = re.compile(r"^ +\w+ = \w+\.(?:size|stride)\(\)$")
