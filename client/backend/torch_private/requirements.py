"""Lists the names that PyGraph needs of torch, part by part, and says which of them the installed torch lacks.

Each part asks once, before it installs anything: a torch that lacks a name leaves that part off, with a reason. A port of PyGraph to
another torch begins here.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPILE_FX = "torch._inductor.compile_fx"
"""The module whose import means that something is about to be compiled."""

REQUIRED = (
    (COMPILE_FX, "cudagraphify"),
    ("torch._inductor.output_code", "CompiledFxGraph.post_compile"),
    ("torch._inductor.output_code", "maybe_realign_inputs"),
    ("torch._inductor.utils", "BoxedBool"),
    ("torch._inductor.output_code", "maybe_handle_backward_generation"),
    ("torch._inductor.config", "save_config_portable"),
    ("torch._inductor.config", "triton.cudagraphs"),
    ("torch._inductor.config", "graph_partition"),
    ("torch._inductor.runtime.runtime_utils", "cache_dir"),
    ("torch", "_TorchCompileInductorWrapper"),
)
"""Modules and names that the hook needs."""

REQUIRED_FIELDS = (
    "current_callable", "compiled_fn_runner", "inductor_post_grad_graph_str", "source_code", "device_types", "device_idxs",
    "mutated_input_idxs", "disabled_cudagraphs_reason", "cudagraph_info", "partition_maps", "fx_kwargs", "inputs_to_check",
)  # fmt: skip
"""Fields of `CompiledFxGraph` that the hook reads or sets."""

PASSES_REQUIRED = (
    ("torch._inductor.config", "post_grad_custom_pre_pass"),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    ("torch._inductor.config", "_config"),
    ("torch._inductor.compile_fx", "_recursive_post_grad_passes"),
    ("torch._inductor.custom_graph_pass", "get_hash_for_files"),
    ("torch._inductor.utils", "get_donated_idxs"),
    ("torch._inductor.lowering", "fallback_handler"),
    ("torch._inductor.lowering", "lowerings"),
    ("torch._inductor.lowering", "register_lowering"),
    ("torch._inductor.virtualized", "V.aot_compilation"),
    ("torch._inductor.virtualized", "V.graph"),
    ("torch._C", "_autograd._top_saved_tensors_default_hooks"),
    ("torch._ops", "OpOverload"),
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch.utils._python_dispatch", "_disable_current_modes"),
)
"""Names that graph passes need beside `REQUIRED`."""

PARTITIONS_REQUIRED = (
    ("torch._inductor.graph", "GraphLowering.codegen"),
    ("torch._inductor.scheduler", "Scheduler.should_partition"),
    ("torch._inductor.utils", "CUDAGraphWrapper.wrapper"),
    ("torch._inductor.utils", "_unstable_customized_partition_wrapper"),
    ("torch._inductor.virtualized", "V.aot_compilation"),
    ("torch._ops", "HigherOrderOperator"),
    ("torch.library", "_impls"),
)
"""Names that splitting graphs needs beside `PASSES_REQUIRED`."""

ARTIFACTS_REQUIRED = (
    ("torch.compiler._cache", "CacheArtifactManager.record_artifact"),
    ("torch.compiler._cache", "CacheArtifactManager.serialize"),
    ("torch.compiler._cache", "CacheArtifactManager._new_cache_artifacts"),
    ("torch.compiler._cache", "CacheArtifactManager._seen_artifacts"),
    ("torch._inductor.runtime.autotune_cache", "AutotuneCacheArtifact"),
)
"""Names that adding to the artifacts of `torch.compiler.save_cache_artifacts` needs."""

GROUP_REQUIRED = (
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    ("torch.distributed", "ProcessGroup._get_backend"),
    ("torch.distributed", "Store.clone"),
    ("torch.distributed", "PrefixStore.underlying_store"),
    ("torch.distributed", "TCPStore"),
)
"""Names that the consensus of ranks needs."""

RELOCATION_REQUIRED = (
    ("torch", "_C._len_torch_dispatch_stack"),
    ("torch", "_C._cuda_memorySnapshot"),
    ("torch", "_C._cuda_isHistoryEnabled"),
    ("torch", "_C._cuda_memoryStats"),
    ("torch", "_C._cuda_clearCublasWorkspaces"),
    ("torch", "_C._cuda_getCurrentRawStream"),
    ("torch", "_C._cuda_getDevice"),
    ("torch", "_C._cuda_isCurrentStreamCapturing"),
    ("torch", "_C._cuda_synchronize"),
    ("torch", "_C._accelerator_synchronizeDevice"),
    ("torch", "Generator.clone_state"),
    ("torch", "Generator.graphsafe_get_state"),
    ("torch", "Generator.graphsafe_set_state"),
    ("torch", "_C._dynamo.guards._reinterpret_tensor"),
    ("torch", "_C._dynamo.guards._empty_strided_cuda"),
    ("torch", "_C._construct_storage_from_data_pointer"),
    ("torch._inductor.codecache", "PyCodeCache.modules"),
    ("torch", "_foreach_copy_"),
    ("torch", "_C._cuda_beginAllocateCurrentThreadToPool"),
    ("torch", "_C._cuda_endAllocateToPool"),
    ("torch", "_C._cuda_releasePool"),
    ("torch", "_C._cuda_customAllocator"),
    ("torch.cuda", "MemPool.id"),
    ("torch.cuda", "graph_pool_handle"),
    ("torch.cuda", "CUDAGraph.raw_cuda_graph"),
    ("torch.cuda", "CUDAGraph.register_generator_state"),
    ("torch.cuda.memory", "_record_memory_history"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._python_dispatch", "_push_mode"),
    ("torch.utils._python_dispatch", "_pop_mode"),
)
"""Names that relocatable graphs need beside `REQUIRED`; a torch without CUDA has few of them."""


@functools.cache
def missing() -> str | None:
    """Return the names that this torch lacks for the hook, as text; None if it has all."""
    output_code: Any = importlib.import_module("torch._inductor.output_code")
    fields = getattr(output_code.CompiledFxGraph, "__dataclass_fields__", {})
    # Fields without a default are no attributes of their class, so `_has` would not find them.
    return lacking(REQUIRED, [f"CompiledFxGraph.{field}" for field in REQUIRED_FIELDS if field not in fields])


@functools.cache
def missing_for_passes() -> str | None:
    """Return the names that this torch lacks for graph passes, as text; None if it has all."""
    graph: Any = importlib.import_module("torch._inductor.graph")
    output_code: Any = importlib.import_module("torch._inductor.output_code")
    more = []
    # `GraphLowering.__init__` sets it on instances alone, and an instance needs a graph.
    if "never_reuse_buffers" not in graph.GraphLowering.__init__.__code__.co_names:
        more.append("never_reuse_buffers")
    if "counter_deltas" not in output_code.CompiledFxGraph.__dataclass_fields__:
        more.append("CompiledFxGraph.counter_deltas")
    return lacking(PASSES_REQUIRED, more)


@functools.cache
def missing_for_partitions() -> str | None:
    """Return the names that this torch lacks for splitting graphs, as text; None if it has all."""
    return lacking(PARTITIONS_REQUIRED)


@functools.cache
def missing_for_groups() -> str | None:
    """Return the names that this torch, which may have no `torch.distributed`, lacks for the consensus of ranks; None if it has all."""
    return lacking(GROUP_REQUIRED)


@functools.cache
def missing_for_relocation() -> str | None:
    """Return the names that this torch lacks for relocatable graphs, as text; None if it has all."""
    return lacking(RELOCATION_REQUIRED)


def lacking(required: Iterable[tuple[str, str]], more: Iterable[str] = ()) -> str | None:
    """Return a text that names the required names that torch lacks, and `more` that it is known to lack; None if there are none."""
    names = [*(f"{module}.{name}" for module, name in required if not _has(module, name)), *more]
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else None


def _has(module: str, name: str) -> bool:
    try:
        functools.reduce(getattr, name.split("."), importlib.import_module(module))
    # A torch that was built without `torch.distributed` lacks whole modules.
    except (ImportError, AttributeError):
        return False
    return True
