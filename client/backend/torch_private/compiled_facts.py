"""Reads the facts of a compiled graph before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend import vouched_operators
from pygraphd.client.backend.torch_private.autograd import donated_inputs, returned_sizes, saved_outputs
from pygraphd.client.backend.torch_private.inductor import cudagraphs_asked, inductor_config
from pygraphd.client.backend.torch_private.library_switches import switches_of
from pygraphd.client.backend.torch_private.operators import host_operators, may_draw, overloads_in
from pygraphd.client.backend.torch_private.partitions import (
    collectives_in,
    is_split_around,
    launches_in,
    others_capture,
    reads_sizes,
    somebody_wraps_partitions,
    without_kernels,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class PartitionMap:
    """How the inputs and outputs of a partition map to those of its graph, by index."""

    inputs: tuple[int | None, ...]
    """The graph's input for each input of the partition; None: another partition makes it."""
    outputs: tuple[tuple[int, ...], ...]
    """The graph's outputs that each output of the partition is; empty: another partition takes it."""


@dataclass(frozen=True, slots=True)
class CompiledFacts:
    """Facts of a `CompiledFxGraph` and its `graph_kwargs`, read before Inductor's `post_compile` runs."""

    text: str
    """The FX graph as Inductor prints it."""
    user_kernels: str
    """The generated code if the user's own Triton kernels are in it, which `text` does not show; else empty."""
    is_backward: bool
    is_inference: bool
    cudagraphs_asked: bool
    refusal: str | None
    """Why Inductor will not capture the graph; None: it will call `cudagraphify` once for each of `partitions`."""
    refused_for_good: bool
    """Whether the reason lies in the compiled graph, and so will be the same in the next process."""
    partitions: int
    on_cuda: bool
    only_cuda: bool
    """Whether the graph runs on one CUDA device and on nothing else."""
    device_index: int | None
    has_dynamic_sizes: bool
    """Whether `text` names sizes. Which partitions take them is seen at their first calls."""
    static_inputs: tuple[int, ...]
    mutated_inputs: tuple[int, ...]
    maps: tuple[PartitionMap, ...] = ()
    """One for each partition; empty: the only partition has the inputs and outputs of the graph."""
    host_operators: tuple[str, ...] = ()
    """The operators that have to run at each call; see `operators.host_operators`."""
    is_repeatable: bool = True
    """Whether all operators are known to run nothing on the host, so that one more run is harmless."""
    hides_writes: bool = False
    """Whether an operator may write to inputs beside `mutated_inputs`; see `vouched_operators.hides_writes`."""
    is_vouched: bool = True
    """Whether all operators are known to run nothing on the host, or are vouched for by the user."""
    calls_host_operators: bool = False
    """Whether a partition calls one of `host_operators`: neither Inductor nor PyGraph has split the graph around all of them."""
    saved: frozenset[int] = frozenset()
    """The outputs of a forward that are saved for its backward, by index; empty: not known."""
    collectives: tuple[frozenset[tuple[str, str]], ...] = ()
    """The collectives that each partition calls; see `collectives_in`."""
    launches: tuple[int, ...] = ()
    """For each partition, how many kernels its generated code calls; see `launches_in`."""
    launches_between: int = 0
    """How many kernels generated code calls between partitions."""
    donated_inputs: frozenset[int] | None = None
    """The inputs of a backward in whose memory its kernels may write other values, by index; None: not known."""
    returned_sizes: frozenset[int] | None = None
    """The numbers of elements of those inputs of a backward that its outputs may lie in; None: not known."""
    uses_streams: bool = False
    """Whether it acts on streams or events of the program; see `vouched_operators.STREAMS`."""
    reads_sizes: bool = False
    """Whether the code of a partition reads sizes off tensors, of which no integer input tells; see `partitions.reads_sizes`."""
    switches: tuple[str, ...] = ()
    """The settings of libraries that its kernels depend on at each call; see `library_switches.switches_of`."""
    is_captured_by_others: bool = False
    """Whether the program captures the graph itself; see `partitions.others_capture`."""
    may_draw: bool = True
    """Whether its kernels may draw random numbers; see `operators.may_draw`."""
    is_split: bool = False
    """Whether PyGraph has had the graph split, so that no partition calls one of `host_operators`; see `split_graphs`."""


def facts(
    compiled: Any, graph_kwargs: Mapping[str, Any], vouched: frozenset[str] = frozenset()
) -> CompiledFacts:
    """Read the facts of a compiled graph. The user vouches for the operators in `vouched`, each a namespace or `namespace::operator`."""
    own_refusal = _own_refusal(compiled)
    refusal = own_refusal or _refusal_from_outside(compiled, graph_kwargs)
    text = compiled.inductor_post_grad_graph_str
    on_cuda = "cuda" in compiled.device_types
    overloads = overloads_in(text)
    operators = host_operators(overloads, vouched)
    named = [f"{space}::{name}" for space, name, _ in overloads]
    uses_streams = any(space == vouched_operators.STREAMS for space, _, _ in overloads)
    is_split = bool(refusal) and not uses_streams and _is_split_by_us(compiled, operators)
    # Without maps, as where Inductor's option for partitions is off, the graph is one.
    maps = _partition_maps(compiled) if is_split or not refusal else ()
    partitions = len(maps) or 1
    # The sources of kernels are most of a large graph's code. To search them for each fact below would cost
    # each compilation, and each hit of Inductor's caches.
    code = without_kernels(compiled.source_code)
    launches, between = launches_in(code, partitions)
    return CompiledFacts(
        text=text,
        user_kernels=compiled.source_code if "triton_kernel_wrapper" in text else "",
        is_backward=bool(graph_kwargs["is_backward"]),
        is_inference=bool(compiled.fx_kwargs.get("is_inference")),
        cudagraphs_asked=cudagraphs_asked(),
        refusal=refusal,
        refused_for_good=own_refusal is not None,
        partitions=partitions,
        on_cuda=on_cuda,
        only_cuda=set(compiled.device_types) == {"cuda"} and len(compiled.device_idxs) == 1,
        device_index=min(compiled.device_idxs) if on_cuda and compiled.device_idxs else None,
        has_dynamic_sizes=_SYMBOLIC in text,
        static_inputs=tuple(compiled.fx_kwargs.get("static_input_idxs") or ()),
        mutated_inputs=tuple(compiled.mutated_input_idxs),
        maps=maps,
        host_operators=operators,
        # Hooks of the program's on intermediate values are calls in the generated code.
        calls_host_operators=uses_streams
        or "run_intermediate_hooks(" in code
        or (bool(operators) and not is_split_around(compiled.source_code, operators)),
        is_repeatable=not vouched_operators.not_vouched(named),
        hides_writes=vouched_operators.hides_writes(named),
        is_vouched=not vouched_operators.not_vouched(named, vouched),
        saved=saved_outputs(compiled),
        collectives=collectives_in(code, named, partitions),
        launches=launches,
        launches_between=between,
        donated_inputs=donated_inputs(compiled, code) if graph_kwargs["is_backward"] else frozenset(),
        returned_sizes=returned_sizes(code, text) if graph_kwargs["is_backward"] else None,
        uses_streams=uses_streams,
        reads_sizes=reads_sizes(code),
        switches=switches_of(code, is_backward=graph_kwargs["is_backward"]),
        is_captured_by_others=others_capture(),
        may_draw=may_draw(overloads),
        is_split=is_split,
    )


def _partition_maps(compiled: Any) -> tuple[PartitionMap, ...]:
    maps = compiled.partition_maps if inductor_config().graph_partition else None
    return tuple(
        PartitionMap(
            tuple(each.input_index_mapping), tuple(map(_outputs_of_graph, each.output_index_mapping))
        )
        for each in maps or ()
    )


def _outputs_of_graph(own: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the graph's outputs that are the same tensor as an output of a partition. Before torch 2.15 that is at most one."""
    if own is None:
        return ()
    return (own,) if isinstance(own, int) else tuple(own)


_SYMBOLIC = ': "Sym('
"""Text after the name of an integer input in a printed graph."""


def _own_refusal(compiled: Any) -> str | None:
    if compiled.disabled_cudagraphs_reason:
        return str(compiled.disabled_cudagraphs_reason)
    # None for graphs compiled without CUDA graphs, for which `_refusal_from_outside` has the reason.
    info = compiled.cudagraph_info
    if info is None:
        return None
    if info.cudagraph_fail_reasons:
        return ", ".join(info.cudagraph_fail_reasons)
    if inductor_config().graph_partition and not compiled.partition_maps:
        return "no part of it can be captured"
    return None


def _refusal_from_outside(compiled: Any, graph_kwargs: Mapping[str, Any]) -> str | None:
    # A forward hands this box on to its backward, and Inductor clears it when it refuses the forward.
    if not graph_kwargs["cudagraphs"]:
        return "not asked for, or refused for its forward"
    return "compiled without CUDA Graphs" if compiled.cudagraph_info is None else None


def _is_split_by_us(compiled: Any, operators: tuple[str, ...]) -> bool:
    if cudagraphs_asked() or not compiled.partition_maps or somebody_wraps_partitions():
        return False
    partitions = getattr(compiled.compiled_fn_runner, "partitions", None) or ()
    # A recording belongs to one GPU.
    are_all_there = len(partitions) == len(compiled.partition_maps) and len(compiled.device_idxs) <= 1
    # The request to split is no proof: an operator in a subgraph is called within a partition.
    return are_all_there and is_split_around(compiled.source_code, operators)
