"""Installs functions around Inductor's own, reads its options, and compiles by it."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pygraphd.client.backend.torch_private.requirements import COMPILE_FX

Runnable = Callable[[list[Any]], Any]
"""Runs a compiled graph or partition; takes Inductor's list of inputs, which it may clear."""
Cudagraphify = Callable[..., Runnable]
AroundPostCompile = Callable[[Callable[[], None], Any, Mapping[str, Any]], None]
AroundCudagraphify = Callable[[Cudagraphify, Runnable, Mapping[str, Any]], Runnable]


def install(
    around_post_compile: AroundPostCompile, around_cudagraphify: AroundCudagraphify
) -> Callable[[], None]:
    """Install two functions around Inductor's own; return a function that removes them.

    `around_post_compile(original, compiled, graph_kwargs)` runs on cold compiles and on cache hits alike.
    `around_cudagraphify(original, runnable, kwargs)` is called within it, once for each partition that can be captured.
    """
    output_code: Any = importlib.import_module("torch._inductor.output_code")
    compile_fx: Any = importlib.import_module(COMPILE_FX)
    post_compile = output_code.CompiledFxGraph.post_compile
    cudagraphify = compile_fx.cudagraphify

    @functools.wraps(post_compile)
    def hooked_post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        original = functools.partial(post_compile, self, example_inputs, constants, graph_kwargs)
        around_post_compile(original, self, graph_kwargs)

    @functools.wraps(cudagraphify)
    def hooked_cudagraphify(
        model: Runnable, static_input_idxs: Sequence[int] = (), **kwargs: Any
    ) -> Runnable:
        return around_cudagraphify(cudagraphify, model, {"static_input_idxs": static_input_idxs, **kwargs})

    def uninstall() -> None:
        # If another patch was put over ours since, ours stays, and passes everything on.
        if output_code.CompiledFxGraph.post_compile is hooked_post_compile:
            output_code.CompiledFxGraph.post_compile = post_compile
        if compile_fx.cudagraphify is hooked_cudagraphify:
            compile_fx.cudagraphify = cudagraphify

    output_code.CompiledFxGraph.post_compile = hooked_post_compile
    # `post_compile` imports the name when it is called, so that replacing the attribute is enough.
    compile_fx.cudagraphify = hooked_cudagraphify
    _leave_backwards_of_ours_alone(output_code)
    return uninstall


_boxes: MutableMapping[Any, None] = WeakIdKeyDictionary()
"""The boxes of forwards that PyGraph runs; an entry dies with its box.

A box, Inductor's `boxed_forward_device_index`, is shared by a forward and its backward. Inductor hashes its content for cache keys, so
nothing may be stored in the box itself."""


def note_ours(box: Any) -> None:
    """Note that PyGraph runs the forward that has this box."""
    if box is not None:
        _boxes[box] = None


def is_ours(box: Any) -> bool:
    """Return whether PyGraph runs the forward that has this box."""
    return box is not None and box in _boxes


def _leave_backwards_of_ours_alone(output_code: Any) -> None:
    """Keep Inductor from asking PyTorch's CUDA graph trees about backwards whose forward PyGraph runs.

    For a backward that Inductor will not capture, it asserts that the trees know the forward. This hook stays when the others are
    removed, since a backward may be compiled long after its forward.
    """
    handle = output_code.maybe_handle_backward_generation
    if getattr(handle, "is_of_pygraph", False):
        return

    @functools.wraps(handle)
    def hooked_handle(compiled_graph: Any, boxed_forward_device_index: Any) -> None:
        if not is_ours(boxed_forward_device_index):
            handle(compiled_graph, boxed_forward_device_index)

    hooked_handle.is_of_pygraph = True  # type: ignore[attr-defined]
    output_code.maybe_handle_backward_generation = hooked_handle


def cudagraphs_asked() -> bool:
    """Return whether the mode that is being compiled asks for CUDA graphs, as `reduce-overhead` does."""
    return bool(inductor_config().triton.cudagraphs)


def inductor_config() -> Any:
    """Return the module that holds Inductor's options."""
    return importlib.import_module("torch._inductor.config")


def inductor_cache() -> Path:
    """Return the folder of Inductor's cache, made if need be; raises OSError."""
    runtime_utils: Any = importlib.import_module("torch._inductor.runtime.runtime_utils")
    return Path(runtime_utils.cache_dir())


# Options that name paths, tools, timeouts or debugging aids: they differ between hosts and change no kernel.
_NO_KERNEL_OPTION = (
    "aot_inductor", "autoheuristic_log_path", "compile_worker", "cpp.cxx", "cuda.cuda_cxx", "debug", "disable_progress",
    "file_lock_timeout", "global_cache_dir", "halide", "is_nightly", "log_", "max_autotune_subproc", "precompilation_timeout",
    "profile_bandwidth", "quiesce_async", "rocm.ck_dir", "rocm.rocm_home", "save_args", "search_autotune_cache", "test_configs",
    "torchinductor_worker", "triton.proton", "triton.store_cubin", "verbose_progress", "worker_", "xpu.oneapi_root",
)  # fmt: skip


def kernel_options() -> tuple[tuple[str, str], ...]:
    """Return the current settings that change which kernels run, as sorted (name, value) pairs."""
    portable = inductor_config().save_config_portable()
    options = {
        name: _value(value) for name, value in portable.items() if not name.startswith(_NO_KERNEL_OPTION)
    }
    options.update(
        {
            "torch.float32_matmul_precision": _read(torch.get_float32_matmul_precision),
            "torch.cuda.matmul.fp32_precision": _read(lambda: torch.backends.cuda.matmul.fp32_precision),
            "torch.deterministic": _read(torch.are_deterministic_algorithms_enabled),
            "torch.cudnn.allow_tf32": _read(lambda: torch.backends.cudnn.allow_tf32),
            "torch.cudnn.conv.fp32_precision": _read(lambda: torch.backends.cudnn.conv.fp32_precision),
            "torch.cudnn.benchmark": _read(lambda: torch.backends.cudnn.benchmark),
            "torch.cudnn.deterministic": _read(lambda: torch.backends.cudnn.deterministic),
        }
    )
    return tuple(sorted(options.items()))


def _read(setting: Callable[[], object]) -> str:
    # Either of the two ways to set fp32 precision may refuse to be read once the other was used.
    try:
        return str(setting())
    except (AttributeError, RuntimeError):
        return "unreadable"


def _value(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=_name)


def _name(value: object) -> str:
    # Never a repr: it may hold an address, and the key would differ in every process.
    kind = value if callable(value) else type(value)
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def align_inputs(compiled: Any) -> None:
    """Have misaligned inputs copied before each call, which Inductor leaves to PyTorch's CUDA graph trees for graphs that it captures."""
    output_code = importlib.import_module("torch._inductor.output_code")
    utils = importlib.import_module("torch._inductor.utils")
    output_code.maybe_realign_inputs(
        utils.BoxedBool(False), compiled, compiled.inputs_to_check, compiled.mutated_input_idxs
    )


def compile_with_inductor(
    graph: Any, example_inputs: Any, mode: str | None, options: Mapping[str, Any] | None
) -> Any:
    """Compile an FX graph as `torch.compile(backend="inductor")` would; raises RuntimeError for a bad mode or option."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options or {}), None)
    return wrapper(graph, example_inputs)


def graph_breaks() -> Iterator[str]:
    """Yield the reason of each graph break since Dynamo was last reset, with the user's file and line."""
    # Never imported for this: it is asked when a program ends.
    utils: Any = sys.modules.get("torch._dynamo.utils")
    for each in getattr(utils, "graph_break_reasons", ()):
        reason = str(each.reason).strip().partition("\n")[0]
        lines = each.user_stack or [None]
        place = next((line for line in reversed(lines) if line and not is_own_file(line.filename)), lines[-1])
        yield reason if place is None else f"{reason} ({place.filename}:{place.lineno})"


def is_own_file(file: str) -> bool:
    """Return whether a file belongs to torch, such as that of an optimiser or a layer."""
    return file.startswith(_FILES_OF_TORCH)


_FILES_OF_TORCH = f"{Path(torch.__file__).parent}/"


def count_in_compilation(name: str, count: int) -> None:
    """Add to a counter of the graph that is being compiled. Inductor keeps the counters with the compiled code, in its caches too."""
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters["inductor"][name] += count


def counted_in_compilation(compiled: Any) -> Mapping[str, int]:
    """Return the counters of a compiled graph, whether it was compiled here or came from Inductor's caches."""
    return cast("Mapping[str, int]", getattr(compiled, "counter_deltas", {}))


def is_in_subgraph() -> bool:
    """Return whether the running graph pass was given a subgraph, such as a branch of `torch.cond`."""
    # Inductor's function calls itself for each subgraph, and a pass is given the graph and nothing else.
    depth, frame = 0, cast("Any", sys._getframe(1))
    while frame is not None:
        depth += frame.f_code.co_name == "_recursive_post_grad_passes"
        frame = frame.f_back
    return depth > 1
