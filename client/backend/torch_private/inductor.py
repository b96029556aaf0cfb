"""Installs functions around Inductor's own, reads its options, and compiles by it."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from pygraphd.client.backend.torch_private.requirements import COMPILE_FX

Runnable = Callable[[list[Any]], Any]

Cudagraphify = Callable[..., Runnable]

PostCompile = Callable[..., None]

AroundPostCompile = Callable[[Callable[[], None], Any, Mapping[str, Any]], None]

AroundCudagraphify = Callable[[Cudagraphify, Runnable, Mapping[str, Any]], Runnable]


def install(
    around_post_compile: AroundPostCompile, around_cudagraphify: AroundCudagraphify
) -> Callable[[], None]:
    """Put the two functions around Inductor's own; return a function that takes them out again.

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
        # Somebody may have put a patch of their own over ours since: then ours stays, and passes everything on.
        if output_code.CompiledFxGraph.post_compile is hooked_post_compile:
            output_code.CompiledFxGraph.post_compile = post_compile
        if compile_fx.cudagraphify is hooked_cudagraphify:
            compile_fx.cudagraphify = cudagraphify

    output_code.CompiledFxGraph.post_compile = hooked_post_compile
    compile_fx.cudagraphify = hooked_cudagraphify
    _leave_backwards_of_ours_alone(output_code)
    return uninstall


_boxes: dict[int, weakref.ref[Any]] = {}
"""What forwards that PyGraph runs share with their backwards, by identity: Inductor's cache keys are made of what such a box holds."""


def note_ours(box: Any) -> None:
    """Note that PyGraph runs the forward that has this box; its backward has the same one."""
    if box is not None:
        number = id(box)
        _boxes[number] = weakref.ref(box, lambda _: _boxes.pop(number, None))


def is_ours(box: Any) -> bool:
    """Whether PyGraph runs the forward that has this box."""
    found = _boxes.get(id(box))
    return found is not None and found() is box


def _leave_backwards_of_ours_alone(output_code: Any) -> None:
    """Have Inductor not ask PyTorch's CUDA Graph trees about backwards whose forward PyGraph runs.

    Of a backward that it will not capture, it asserts that the trees are there and know the forward. This stays when the rest is
    taken out: a backward may be compiled long after its forward.
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


def cuda_is_set_up() -> bool:
    """Whether this process has used CUDA; asking whether it could has consequences for its forked children."""
    return bool(torch.cuda.is_initialized())


def cudagraphs_asked() -> bool:
    """Whether the mode that is being compiled has the semantics of PyTorch's CUDA Graphs."""
    return bool(inductor_config().triton.cudagraphs)


def inductor_config() -> Any:
    """Return the module that holds Inductor's options."""
    return importlib.import_module("torch._inductor.config")


# Options that name places, tools, timeouts or debugging aids: they differ between hosts and change no kernel that runs.
_NO_KERNEL_OPTION = (
    "aot_inductor", "autoheuristic_log_path", "compile_worker", "cpp.cxx", "cuda.cuda_cxx", "debug", "disable_progress",
    "file_lock_timeout", "global_cache_dir", "halide", "is_nightly", "log_", "max_autotune_subproc", "precompilation_timeout",
    "profile_bandwidth", "quiesce_async", "rocm.ck_dir", "rocm.rocm_home", "save_args", "search_autotune_cache", "test_configs",
    "torchinductor_worker", "triton.proton", "triton.store_cubin", "verbose_progress", "worker_", "xpu.oneapi_root",
)  # fmt: skip


def kernel_options() -> tuple[tuple[str, str], ...]:
    """Return the settings in force that change which kernels run, as sorted (name, value) pairs."""
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


class _Instead:
    """A compiled graph with another callable; torch asks it for more in some versions than in others."""

    def __init__(self, compiled: Any, run: Runnable) -> None:
        self._compiled = compiled
        self.current_callable = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def aligned(compiled: Any, run: Runnable) -> Runnable:
    """Return what copies misaligned inputs of `compiled` before it runs, as Inductor does for graphs that it does not capture.

    Of those that it believes to be captured, it leaves that to PyTorch's CUDA Graph trees.
    """
    output_code = importlib.import_module("torch._inductor.output_code")
    utils = importlib.import_module("torch._inductor.utils")
    made = _Instead(compiled, run)
    output_code.maybe_realign_inputs(
        utils.BoxedBool(False), made, compiled.inputs_to_check, compiled.mutated_input_idxs
    )
    return made.current_callable


def compile_with_inductor(
    graph: Any, example_inputs: Any, mode: str | None, options: Mapping[str, Any] | None
) -> Any:
    """Compile an FX graph as `torch.compile(backend="inductor")` would; raises RuntimeError for bad mode or options."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options or {}), None)
    return wrapper(graph, example_inputs)


def graph_breaks() -> Iterator[str]:
    """Yield why Dynamo has ended graphs, since it was reset last, each with the user's line."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    for each in getattr(utils, "graph_break_reasons", ()):
        reason = str(each.reason).strip().partition("\n")[0]
        lines = each.user_stack or [None]
        place = next((line for line in reversed(lines) if line and not is_own_file(line.filename)), lines[-1])
        yield reason if place is None else f"{reason} ({place.filename}:{place.lineno})"


def is_own_file(file: str) -> bool:
    """Whether a file is one of torch's, such as an optimiser or a layer that a graph has a part of."""
    return file.startswith(_FILES_OF_TORCH)


_FILES_OF_TORCH = f"{Path(torch.__file__).parent}/"


def count_in_compilation(name: str, count: int) -> None:
    """Count something among what Inductor counts of the graph that it is compiling, and keeps with it."""
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters["inductor"][name] += count


def counted_in_compilation(compiled: Any) -> Mapping[str, int]:
    """Return what was counted while a graph was compiled, here or by whoever has filled Inductor's caches."""
    return cast("Mapping[str, int]", compiled.counter_deltas)


def is_in_subgraph() -> bool:
    """Whether the pass that is running was given a graph within another, such as a branch of `torch.cond`."""
    depth, frame = 0, cast("Any", sys._getframe(1))
    while frame is not None:
        depth += frame.f_code.co_name == "_recursive_post_grad_passes"
        frame = frame.f_back
    return depth > 1
