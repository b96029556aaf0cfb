"""Lists the names that PyGraph needs of torch, part by part, and says which of them the installed torch lacks.

Each part asks once, before it installs anything: a torch that lacks a name leaves that part off, with a reason. A port of PyGraph to
another torch begins here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

COMPILE_FX = "torch._inductor.compile_fx"
"""The module whose import means that something is about to be compiled."""

Names = Mapping[str, tuple[str, ...]]
"""Names by the module that has them."""

REQUIRED: Names = {
    COMPILE_FX: ("cudagraphify",),
    "torch._inductor.output_code": ("CompiledFxGraph.post_compile", "maybe_realign_inputs", "maybe_handle_backward_generation"),
    "torch._inductor.utils": ("BoxedBool",),
    "torch._inductor.config": ("save_config_portable", "triton.cudagraphs", "graph_partition"),
    "torch._inductor.runtime.runtime_utils": ("cache_dir",),
    "torch": ("_TorchCompileInductorWrapper",),
}  # fmt: skip
"""Modules and names that the hook needs."""

REQUIRED_FIELDS = (
    "current_callable", "compiled_fn_runner", "inductor_post_grad_graph_str", "source_code", "device_types", "device_idxs",
    "mutated_input_idxs", "disabled_cudagraphs_reason", "cudagraph_info", "partition_maps", "fx_kwargs", "inputs_to_check",
)  # fmt: skip
"""Fields of `CompiledFxGraph` that the hook reads or sets."""

Part = Literal["passes", "partitions", "artifacts", "groups", "relocation"]

REQUIRED_FOR: dict[Part, Names] = {
    # For graph passes, beside `REQUIRED`.
    "passes": {
        "torch._inductor.config": ("post_grad_custom_pre_pass", "_config"),
        "torch._inductor.custom_graph_pass": ("CustomGraphPass", "get_hash_for_files"),
        "torch._inductor.compile_fx": ("_recursive_post_grad_passes",),
        "torch._inductor.utils": ("get_donated_idxs",),
        "torch._inductor.lowering": ("fallback_handler", "lowerings", "register_lowering"),
        "torch._inductor.virtualized": ("V.aot_compilation", "V.graph"),
        "torch._C": ("_autograd._top_saved_tensors_default_hooks",),
        "torch._ops": ("OpOverload",),
        "torch._subclasses.fake_tensor": ("FakeTensor",),
        "torch.utils._python_dispatch": ("_disable_current_modes",),
    },
    # For splitting graphs, beside the names for passes.
    "partitions": {
        "torch._inductor.graph": ("GraphLowering.codegen",),
        "torch._inductor.ir": ("MultiOutput",),
        "torch._inductor.scheduler": ("Scheduler.should_partition", "Scheduler.reorder_for_partition_with_simple_dependency"),
        "torch._inductor.utils": ("CUDAGraphWrapper.wrapper", "_unstable_customized_partition_wrapper"),
        "torch._inductor.virtualized": ("V.aot_compilation",),
        "torch._ops": ("HigherOrderOperator",),
        "torch.library": ("_impls",),
    },
    # For adding to the artifacts of `torch.compiler.save_cache_artifacts`.
    "artifacts": {
        "torch.compiler._cache": (
            "CacheArtifactManager.record_artifact", "CacheArtifactManager.serialize", "CacheArtifactManager._new_cache_artifacts",
            "CacheArtifactManager._seen_artifacts",
        ),
        "torch._inductor.runtime.autotune_cache": ("AutotuneCacheArtifact",),
    },
    # For the consensus of ranks; a torch may have no `torch.distributed`.
    "groups": {
        "torch.distributed.distributed_c10d": ("_get_default_store", "_resolve_process_group"),
        "torch.distributed": ("ProcessGroup._get_backend", "Store.clone", "PrefixStore.underlying_store", "TCPStore"),
    },
    # For relocatable graphs, beside `REQUIRED`; a torch without CUDA has few of them.
    "relocation": {
        "torch": (
            "_C._len_torch_dispatch_stack", "_C._cuda_memorySnapshot", "_C._cuda_isHistoryEnabled", "_C._cuda_memoryStats",
            "_C._cuda_clearCublasWorkspaces", "_C._cuda_getCurrentRawStream", "_C._cuda_getDevice", "_C._cuda_isCurrentStreamCapturing",
            "_C._cuda_synchronize", "_C._accelerator_synchronizeDevice", "Generator.clone_state", "Generator.graphsafe_get_state",
            "Generator.graphsafe_set_state", "_C._dynamo.guards._reinterpret_tensor", "_C._dynamo.guards._empty_strided_cuda",
            "_C._construct_storage_from_data_pointer", "_foreach_copy_", "_C._cuda_beginAllocateCurrentThreadToPool",
            "_C._cuda_endAllocateToPool", "_C._cuda_releasePool", "_C._cuda_customAllocator",
        ),
        "torch._inductor.codecache": ("PyCodeCache.modules",),
        "torch.cuda": ("MemPool.id", "graph_pool_handle", "CUDAGraph.raw_cuda_graph", "CUDAGraph.register_generator_state"),
        "torch.cuda.memory": ("_record_memory_history",),
        "torch.utils._python_dispatch": ("TorchDispatchMode", "_get_current_dispatch_mode", "_push_mode", "_pop_mode"),
    },
}  # fmt: skip
"""Modules and names that each part needs."""


@functools.cache
def missing() -> str | None:
    """Return the names that this torch lacks for the hook, as text; None if it has all."""
    output_code: Any = importlib.import_module("torch._inductor.output_code")
    fields = getattr(output_code.CompiledFxGraph, "__dataclass_fields__", {})
    # Fields without a default are no attributes of their class, so `_has` would not find them.
    return lacking(REQUIRED, [f"CompiledFxGraph.{field}" for field in REQUIRED_FIELDS if field not in fields])


@functools.cache
def missing_for(part: Part) -> str | None:
    """Return the names that this torch lacks for a part, as text; None if it has all."""
    return lacking(REQUIRED_FOR[part], _lost_fields() if part == "passes" else ())


def _lost_fields() -> Iterator[str]:
    """Yield the fields that graph passes need and that are missing: `_has` would find none of them on the classes."""
    graph: Any = importlib.import_module("torch._inductor.graph")
    output_code: Any = importlib.import_module("torch._inductor.output_code")
    # `GraphLowering.__init__` sets it on instances alone, and an instance needs a graph.
    if "never_reuse_buffers" not in graph.GraphLowering.__init__.__code__.co_names:
        yield "never_reuse_buffers"
    if "counter_deltas" not in output_code.CompiledFxGraph.__dataclass_fields__:
        yield "CompiledFxGraph.counter_deltas"


def lacking(required: Names, more: Iterable[str] = ()) -> str | None:
    """Return a text that names the required names that torch lacks, and `more` that it is known to lack; None if there are none."""
    all_of_them = ((module, name) for module, names in required.items() for name in names)
    lost = [*(f"{module}.{name}" for module, name in all_of_them if not _has(module, name)), *more]
    return f"torch {torch.__version__} lacks {', '.join(lost)}" if lost else None


def _has(module: str, name: str) -> bool:
    try:
        functools.reduce(getattr, name.split("."), importlib.import_module(module))
    # A torch that was built without `torch.distributed` lacks whole modules.
    except (ImportError, AttributeError):
        return False
    return True
