"""The only package that names private torch. Supports 2.11 to 2.15; a contract test pins the names that are used of each version.

Importing it imports torch, and most names import Inductor when they are used. Until Inductor is imported, only the profiler is watched.
Who ports PyGraph to another torch begins with `requirements.py`. All other code calls `torch_private.NAME`.
"""

# A list of names, several in a line.
# mypy: implicit-reexport
# ruff: noqa: F401, I001
# fmt: off
from __future__ import annotations

from pygraphd.client.backend.torch_private.artifacts import add_to_artifacts
from pygraphd.client.backend.torch_private.autograd import (
    has_dispatch_modes, no_dispatch_modes, no_hooks_see_saved, saves_by_hooks,
)
from pygraphd.client.backend.torch_private.capture import (
    Pool, allocation_history, capturing, clear_workspaces, current_device, current_stream, empty_cache, graphs_share_random_state,
    history_is_recorded, in_capture, keeps_freed_memory, pool_served_by, release_pool, stream_watch, threads_that_compile,
)
from pygraphd.client.backend.torch_private.compiled_facts import CompiledFacts, PartitionMap, facts
from pygraphd.client.backend.torch_private.distributed import before_groups_end, default_store, group_on_gpus
from pygraphd.client.backend.torch_private.inductor import (
    Cudagraphify, Runnable, align_inputs, compile_with_inductor, count_in_compilation, counted_in_compilation, cudagraphs_asked,
    graph_breaks, inductor_cache, install, is_in_subgraph, is_ours, is_own_file, kernel_options, note_ours,
)
from pygraphd.client.backend.torch_private.library_switches import Condition, are_set, switches
from pygraphd.client.backend.torch_private.operators import is_mutable, keep_results, lower_as, operator_of
from pygraphd.client.backend.torch_private.other_threads import device_waits_put_off
from pygraphd.client.backend.torch_private.partitions import graphs_are_split, split_graphs, split_partitions
from pygraphd.client.backend.torch_private.passes import (
    FILES, PASS_OPTION, add_pass, current_pass, fake_on, has_frozen_values, is_added, is_for_export, is_for_package, pass_after,
    without_modes,
)
from pygraphd.client.backend.torch_private.profiling import is_profiled, named, was_profiled, watch_profiler
from pygraphd.client.backend.torch_private.requirements import (
    COMPILE_FX, missing, missing_for,
)
from pygraphd.client.backend.torch_private.tensors import (
    Allocator, allocations_by, allocator, configure_helper, copy_all, dtype_code, memory_at, missing_for_helper, reinterpret, stream_function,
    viewed_like,
)
