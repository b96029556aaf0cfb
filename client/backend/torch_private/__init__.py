"""The only file that names private torch. Supports 2.11 to 2.15; a contract test pins what is used of each.

`missing()` is asked once before anything is installed: a torch that lacks a name leaves the hook off, with a reason.
Importing this module imports Inductor, so it is imported only when Inductor is there already. It is long because it is one: who
ports PyGraph to another torch has to look nowhere else.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import importlib
import json
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraphd.client.backend import vouched_operators

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
    ("torch", "_TorchCompileInductorWrapper"),
)
REQUIRED_FIELDS = (
    "current_callable",
    "compiled_fn_runner",
    "inductor_post_grad_graph_str",
    "source_code",
    "device_types",
    "device_idxs",
    "mutated_input_idxs",
    "disabled_cudagraphs_reason",
    "cudagraph_info",
    "partition_maps",
    "fx_kwargs",
    "inputs_to_check",
)
"""Fields of `CompiledFxGraph` that are read or set here."""

Runnable = Callable[[list[Any]], Any]
Cudagraphify = Callable[..., Runnable]


@functools.cache
def missing() -> str | None:
    """Return what this torch lacks, or None if all that is needed is there."""
    names = [f"{module}.{name}" for module, name in REQUIRED if not _has(module, name)]
    output_code = importlib.import_module("torch._inductor.output_code")
    fields = getattr(output_code.CompiledFxGraph, "__dataclass_fields__", {})
    names += [f"CompiledFxGraph.{field}" for field in REQUIRED_FIELDS if field not in fields]
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else None


def _has(module: str, name: str) -> bool:
    try:
        functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


# --- installing -------------------------------------------------------------------------------------------------

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


# --- what a compiled graph is -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionMap:
    """Which inputs and outputs of a graph those of a partition are; an output of it may be several of the graph's."""

    inputs: tuple[int | None, ...]
    """None: it comes from another partition."""
    outputs: tuple[tuple[int, ...], ...]
    """Empty: it goes to another one."""


@dataclass(frozen=True, slots=True)
class CompiledFacts:
    """What is read of a `CompiledFxGraph` and its `graph_kwargs` before Inductor's `post_compile` runs.

    `refusal` says why Inductor will not capture it; None means that it will call `cudagraphify` `partitions` times.
    `refused_for_good`: the reason lies in the compiled graph, and will be the same next time. `user_kernels` is the
    generated code if kernels of the user's are in it, of which `text` says nothing; else empty.
    """

    text: str
    user_kernels: str
    is_backward: bool
    is_inference: bool
    cudagraphs_asked: bool
    refusal: str | None
    refused_for_good: bool
    partitions: int
    on_cuda: bool
    only_cuda: bool
    """It runs on one CUDA device and on nothing else."""
    device_index: int | None
    has_dynamic_sizes: bool
    """Its text names sizes; whether a partition is given them is seen at its first call."""
    static_inputs: tuple[int, ...]
    mutated_inputs: tuple[int, ...]
    maps: tuple[PartitionMap, ...] = ()
    """Of each partition; empty: there is one, which has what the graph has."""
    host_operators: tuple[str, ...] = ()
    """Its operators that have to run at each call; see `host_operators`."""
    is_repeatable: bool = True
    """All of its operators are known to run nothing on the host."""
    is_vouched: bool = True
    """So they are, or the user vouches for them."""
    saved: frozenset[int] = frozenset()
    """Outputs of a forward that are saved for its backward; empty: it is not known."""
    is_split: bool = False
    """It is not captured by Inductor, and has partitions none of which calls any of these; see `split_graphs`."""


def facts(
    compiled: Any, graph_kwargs: Mapping[str, Any], vouched: frozenset[str] = frozenset()
) -> CompiledFacts:
    """Read the facts of a compiled graph; the user vouches for some operators, by namespace or name."""
    own_refusal = _own_refusal(compiled)
    refusal = own_refusal or _refusal_from_outside(compiled, graph_kwargs)
    text = compiled.inductor_post_grad_graph_str
    on_cuda = "cuda" in compiled.device_types
    operators = host_operators(text, vouched)
    named = [*_operators_in(text)]
    is_split = bool(refusal) and _is_split_by_us(compiled, operators)
    partitions = _partitions(compiled) if is_split or not refusal else 1
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
        maps=_partition_maps(compiled) if is_split or not refusal else (),
        host_operators=operators,
        is_repeatable=not vouched_operators.not_vouched(named),
        is_vouched=not vouched_operators.not_vouched(named, vouched),
        saved=_saved_outputs(compiled),
        is_split=is_split,
    )


_SAVED = "pygraph saved: "
"""Begins what is counted of a graph that has outputs which are saved for a backward; their indices follow."""


def _keep_saved(graph: torch.fx.Graph) -> None:
    """Keep with what is being compiled which outputs of it are saved for its backward."""
    if is_in_subgraph():
        return
    told = graph.output_node().meta.get("desc") or ()  # of each output, what AOTAutograd has it for
    saved = [index for index, each in enumerate(told) if type(each).__name__.startswith("SavedForBackwards")]
    if saved:
        count_in_compilation(_SAVED + json.dumps(saved), 1)


def _saved_outputs(compiled: Any) -> frozenset[int]:
    found = (
        name.removeprefix(_SAVED)
        for name in getattr(compiled, "counter_deltas", ())
        if name.startswith(_SAVED)
    )
    return frozenset(json.loads(next(found, "[]")))


def saves_by_hooks() -> bool:
    """Whether hooks see what is saved for backwards in this thread: one might give its storage back."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


Overload = tuple[str, str, str | None]
"""The namespace, name and overload of an operator; those that take functions have no overloads."""


def host_operators(text: str, vouched: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return which operators of a printed graph have to run at each call, sorted, each as `namespace::operator`.

    These are the ones that are tagged `cudagraph_unsafe`, and those that nobody vouches for: all of them in modes without CUDA graphs, and
    those implemented in Python, which may read or change anything there, in the other modes too.
    """
    found = (each for line in _code_of(text) for each in _OPERATOR.finditer(line))
    return _host_operators(((each[1], each[2], each[3]) for each in found), vouched)


def _operators_in(text: str) -> set[str]:
    """Return the operators of a printed graph, each as `namespace::operator`."""
    overloads = (each.groups() for line in _code_of(text) for each in _OPERATOR.finditer(line))
    return {f"{space}::{name}" for space, name, _ in overloads}


def _host_operators(overloads: Iterable[Overload], vouched: frozenset[str]) -> tuple[str, ...]:
    overloads = {*overloads}
    unsafe = {f"{space}::{name}" for space, name, overload in overloads if _is_unsafe(space, name, overload)}
    names = {f"{space}::{name}" for space, name, _ in overloads}
    if cudagraphs_asked():
        names = {
            f"{space}::{name}" for space, name, overload in overloads if _is_in_python(space, name, overload)
        }
    return tuple(sorted(unsafe.union(vouched_operators.not_vouched(names, vouched))))


def _code_of(text: str) -> Iterator[str]:
    """Yield the lines of a printed graph that are no comments: these quote the user's code."""
    return (line for line in text.splitlines() if not line.lstrip().startswith("#"))


_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")


def _is_in_python(namespace: str, name: str, overload: str | None) -> bool:
    """Whether what an operator runs on a GPU was registered from Python."""
    known: set[str] = torch.library._impls
    own = f"{namespace}/{name}" if overload in {None, "", "default"} else f"{namespace}/{name}.{overload}"
    return any(f"{own}/{key}" in known for key in _RUN_ON_GPU)


_RUN_ON_GPU = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def _is_unsafe(namespace: str, name: str, overload: str | None) -> bool:
    if namespace == vouched_operators.HIGHER_ORDER:
        return False
    packet = getattr(getattr(torch.ops, namespace), name, None)
    operator = getattr(packet, overload or "default", None)
    return torch.Tag.cudagraph_unsafe in getattr(operator, "tags", ())


def _partition_maps(compiled: Any) -> tuple[PartitionMap, ...]:
    maps = compiled.partition_maps if _inductor_config().graph_partition else None
    return tuple(
        PartitionMap(
            tuple(each.input_index_mapping), tuple(map(_outputs_of_graph, each.output_index_mapping))
        )
        for each in maps or ()
    )


def _outputs_of_graph(own: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return which outputs of a graph one of a partition is: torch 2.15 says all of them, earlier versions one or None."""
    if own is None:
        return ()
    return (own,) if isinstance(own, int) else tuple(own)


_SYMBOLIC = ': "Sym('
"""What follows the name of an integer in a printed graph."""


def cudagraphs_asked() -> bool:
    """Whether the mode that is being compiled has the semantics of PyTorch's CUDA Graphs."""
    return bool(_inductor_config().triton.cudagraphs)


def _own_refusal(compiled: Any) -> str | None:
    if compiled.disabled_cudagraphs_reason:
        return str(compiled.disabled_cudagraphs_reason)
    info = compiled.cudagraph_info
    if info is None:
        return None
    if info.cudagraph_fail_reasons:
        return ", ".join(info.cudagraph_fail_reasons)
    if _inductor_config().graph_partition and not compiled.partition_maps:
        return "no part of it can be captured"
    return None


def _refusal_from_outside(compiled: Any, graph_kwargs: Mapping[str, Any]) -> str | None:
    if not graph_kwargs["cudagraphs"]:
        return "not asked for, or refused for its forward"
    return "compiled without CUDA Graphs" if compiled.cudagraph_info is None else None


def _is_split_by_us(compiled: Any, operators: tuple[str, ...]) -> bool:
    if cudagraphs_asked() or not compiled.partition_maps or _somebody_wraps_partitions():
        return False
    partitions = getattr(compiled.compiled_fn_runner, "partitions", None) or ()
    are_all_there = len(partitions) == len(compiled.partition_maps) and len(compiled.device_idxs) <= 1
    return are_all_there and _is_split_around(compiled.source_code, operators)


def _partitions(compiled: Any) -> int:
    return len(compiled.partition_maps) if _inductor_config().graph_partition else 1


def _inductor_config() -> Any:
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
    portable = _inductor_config().save_config_portable()
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


# --- what has to be done around Inductor's own handling ---------------------------------------------------------


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


# --- graph passes -----------------------------------------------------------------------------------------------


PASSES_REQUIRED = (
    ("torch._inductor.config", "post_grad_custom_pre_pass"),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    ("torch._inductor.config", "_config"),
    ("torch._inductor.compile_fx", "_recursive_post_grad_passes"),
    ("torch._inductor.custom_graph_pass", "get_hash_for_files"),
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
"""What changing graphs before they are lowered needs beside `REQUIRED`."""

PASS_OPTION = "post_grad_custom_pre_pass"
"""Inductor's option for the pass; it holds one, or from 2.13 on several."""

GraphPass = Callable[[torch.fx.Graph], None]


@functools.cache
def missing_for_passes() -> str | None:
    """Return what this torch lacks for graphs to be changed before they are lowered, or None."""
    names = [f"{module}.{name}" for module, name in PASSES_REQUIRED if not _has(module, name)]
    graph: Any = importlib.import_module("torch._inductor.graph")
    names += [
        name
        for name in ("never_reuse_buffers",)
        if name not in graph.GraphLowering.__init__.__code__.co_names
    ]
    output_code: Any = importlib.import_module("torch._inductor.output_code")
    if "counter_deltas" not in output_code.CompiledFxGraph.__dataclass_fields__:
        names.append("CompiledFxGraph.counter_deltas")
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else None


def pass_after(before: Any, run: GraphPass, files: Sequence[str]) -> Any:
    """Return what Inductor takes for a graph pass: `before`, one of the user's or None, and then `run`, while it is `active`.

    `files` hold the code of `run`: Inductor's caches keep graphs apart that other code has changed. Raises TypeError for a pass
    of the user's that takes more than the graph.
    """
    module: Any = importlib.import_module("torch._inductor.custom_graph_pass")
    earlier = before if isinstance(before, list | tuple) else [before] if before is not None else []
    takes_more = getattr(module, "CustomInferenceAwareGraphPass", ())  # 2.11 has none
    if any(isinstance(each, takes_more) for each in earlier):
        raise TypeError("a pass of the user's takes more than the graph")
    own = module.get_hash_for_files(tuple(files))

    class Passes(module.CustomGraphPass):  # type: ignore[misc]
        active = True
        is_of_pygraph = True

        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in (*earlier, run) if self.active else earlier:
                each(graph)
            if self.active:
                _keep_saved(graph)

        def uuid(self) -> Any:
            uuids = [each.uuid() if isinstance(each, module.CustomGraphPass) else None for each in earlier]
            if not all(uuids):
                return None  # as with theirs alone, nothing is cached
            return (*uuids, own, is_for_elsewhere(), *_split_by) if self.active else (*uuids,)

        def __deepcopy__(self, memo: object) -> Passes:
            return self  # each thread takes a copy of a default, which is to be this one

    return Passes()


def add_pass(run: GraphPass, files: Sequence[str]) -> Callable[[], None]:
    """Have Inductor run a pass over each graph before it lowers it, after the user's; return what takes it out again."""
    config = _inductor_config()
    # From 2.12 on what is set holds for one thread, and backwards are compiled in others: for these there is the default.
    entry = config._config[PASS_OPTION]
    default, before = entry.default, getattr(config, PASS_OPTION)
    everywhere = pass_after(default, run, files)
    here = everywhere if before is default else pass_after(before, run, files)
    entry.default = everywhere
    setattr(config, PASS_OPTION, here)

    def remove() -> None:
        everywhere.active = here.active = False  # threads may have taken them up for good
        if entry.default is everywhere:
            entry.default = default
        # Somebody may have put a pass of their own there since: then that stays.
        if getattr(config, PASS_OPTION) in (here, everywhere):
            setattr(config, PASS_OPTION, before)

    return remove


def is_added(graph_pass: Any) -> bool:
    """Whether a graph pass is one of `pass_after`'s, and active."""
    return getattr(graph_pass, "is_of_pygraph", False) and bool(graph_pass.active)


def current_pass() -> Any:
    """Return the graph pass that Inductor runs in this thread, or None."""
    return getattr(_inductor_config(), PASS_OPTION)


def count_in_compilation(name: str, count: int) -> None:
    """Count something among what Inductor counts of the graph that it is compiling, and keeps with it."""
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters["inductor"][name] += count


def counted_in_compilation(compiled: Any) -> Mapping[str, int]:
    """Return what was counted while a graph was compiled, here or by whoever has filled Inductor's caches."""
    return cast("Mapping[str, int]", compiled.counter_deltas)


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


def is_in_subgraph() -> bool:
    """Whether the pass that is running was given a graph within another, such as a branch of `torch.cond`."""
    depth, frame = 0, cast("Any", sys._getframe(1))
    while frame is not None:
        depth += frame.f_code.co_name == "_recursive_post_grad_passes"
        frame = frame.f_back
    return depth > 1


def graphs_are_split() -> bool:
    """Whether what is captured of the graph that is being compiled goes without what cannot be captured, by Inductor or by `split_graphs`."""
    config = _inductor_config()
    return bool(config.graph_partition and (config.triton.cudagraphs or _split_by))


_FOR_ELSEWHERE = frozenset({"standalone_compile", "aot_compile", "aot_compile_fullgraph", "compile_fx_aot"})
"""Functions that make what is compiled within them something to be saved, and loaded by programs without us."""


def is_for_elsewhere() -> bool:
    """Whether what is being compiled may run in a program that knows nothing of operators of ours, or is no Python."""
    config, functorch = _inductor_config(), importlib.import_module("torch._functorch.config")
    virtualized: Any = importlib.import_module("torch._inductor.virtualized")
    if config.cpp_wrapper or virtualized.V.aot_compilation is True:
        return True
    if getattr(functorch, "bundled_autograd_cache", False):  # of `caching_precompile`, for one
        return True
    frame = cast("Any", sys._getframe(1))
    while frame is not None and frame.f_code.co_name not in _FOR_ELSEWHERE:
        frame = frame.f_back
    return frame is not None


def keep_results(operator: Any) -> None:
    """Have Inductor write into none of the tensors that an operator returns as a list: they are for further calls, too."""
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    virtualized: Any = importlib.import_module("torch._inductor.virtualized")
    if operator in lowering.lowerings:
        return
    fallback = lowering.fallback_handler(operator)

    def lower(*args: Any, **kwargs: Any) -> Any:
        results = fallback(*args, **kwargs)
        virtualized.V.graph.never_reuse_buffers.update(each.get_name() for each in results)
        return results

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def lower_as(operator: Any, like: Any) -> None:
    """Have Inductor compile an operator as it does another, which takes the same."""
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(lowering.lowerings[like])


def has_frozen_values(module: Any) -> bool:
    """Whether parameters are constants of a graph: then what is made of them must not outlive them in Inductor's caches."""
    return bool(getattr(module, "_has_frozen_params", False))


def without_modes() -> contextlib.AbstractContextManager[object]:
    """Return what has operators compute, although a graph is being traced or compiled."""
    modes: Any = importlib.import_module("torch.utils._python_dispatch")
    without: contextlib.AbstractContextManager[object] = modes._disable_current_modes()
    return without


def operator_of(node: torch.fx.Node) -> Any | None:
    """Return the operator, of one overload, that a node of a graph calls; None if it calls something else, or nothing."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes to what it is given."""
    return bool(operator._schema.is_mutable)


def fake_on(device: torch.device, like: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the layout of another, on another device."""
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    mode: Any = like.fake_mode
    layout = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    made: torch.Tensor = fake.FakeTensor(mode, layout, device)
    return made


# --- partitions around operators that run at each call ----------------------------------------------------------------------


PARTITIONS_REQUIRED = (
    ("torch._inductor.graph", "GraphLowering.codegen"),
    ("torch._inductor.scheduler", "Scheduler.should_partition"),
    ("torch._inductor.utils", "CUDAGraphWrapper.wrapper"),
    ("torch._inductor.utils", "_unstable_customized_partition_wrapper"),
    ("torch._inductor.virtualized", "V.aot_compilation"),
    ("torch._ops", "HigherOrderOperator"),
    ("torch.library", "_impls"),
)
"""What splitting graphs around some operators needs beside `PASSES_REQUIRED`."""


@functools.cache
def missing_for_partitions() -> str | None:
    """Return what this torch lacks for graphs to be split around operators, or None."""
    names = [f"{module}.{name}" for module, name in PARTITIONS_REQUIRED if not _has(module, name)]
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else None


class _Splitting(threading.local):
    """How the graph that a thread generates code for is split: around these operators, and in the way of modes with CUDA graphs if it `is_on`."""

    operators: frozenset[str] = frozenset()
    is_on = False


_splitting = _Splitting()
_SPLIT_ON = "cuda"
_split_by: tuple[str, ...] = ()
"""What decides where graphs are split, for the keys of Inductor's caches; empty: they are not."""


def split_graphs(vouched: frozenset[str]) -> Callable[[], None]:
    """Have Inductor split graphs in every mode around host operators and all that does not run on GPUs; return a function that ends that.

    Inductor splits graphs only in modes with CUDA graphs, or for who has set a wrapper of partitions: it is made to believe that there is one
    while it generates code for such a graph, in that thread alone. Other graphs' code is as it would be without us, and so is their key in Inductor's
    caches. `vouched` is what the user vouches for.
    """
    global _split_by
    module: Any = importlib.import_module("torch._inductor.custom_graph_pass")
    before, _split_by = (
        _split_by,
        (str(module.get_hash_for_files((__file__, vouched_operators.__file__))), *sorted(vouched)),
    )
    undo = [
        _around(importlib.import_module("torch._inductor.graph").GraphLowering, "codegen", _splitting_codegen(vouched)),
        _around(importlib.import_module("torch._inductor.scheduler").Scheduler, "should_partition", _split_here),
        _pretend_to_wrap(),
    ]  # fmt: skip

    def stop() -> None:
        global _split_by
        _split_by = before
        for each in undo:
            each()

    return stop


def _around(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Have `around(original, self, ...)` be called for a method; return a function that ends that."""
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
    """Return the host operators of a graph that is to be split by us, and whether it is: if it has any, or does not run on GPUs alone."""
    try:
        if not _inductor_config().graph_partition or _SPLIT_ON not in lowering.device_types:
            return frozenset(), False
        if not is_added(current_pass()) or is_for_elsewhere():  # else the key would not say so
            return frozenset(), False
        operators = frozenset(_host_operators(_overloads_of(lowering.orig_gm), vouched))
        return operators, bool(operators) or len({*lowering.device_types} - {"meta"}) > 1
    except Exception:  # noqa: BLE001 - it is ours, within the user's compilation: the graph stays whole
        return frozenset(), False


def _overloads_of(module: Any) -> Iterator[Overload]:
    """Yield the operators that a graph and those within it call, or hand to one that they call."""
    for each in module.modules():
        for node in each.graph.nodes if isinstance(each, torch.fx.GraphModule) else ():
            for value in (node.target, *node.args):
                if isinstance(value, torch._ops.HigherOrderOperator):
                    yield vouched_operators.HIGHER_ORDER, value.name(), None
                elif isinstance(value, torch._ops.OpOverload):
                    namespace, _, name = value._schema.name.partition("::")
                    yield namespace, name, value._overloadname


def _split_here(
    original: Callable[..., Any], scheduler: Any, node: Any, *arguments: Any, **named: Any
) -> Any:
    """Answer `Scheduler.should_partition`: up to 2.12 with a truth value, later with a reason."""
    operator = getattr(getattr(node, "node", None), "op_overload", None)
    name = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else None
    if name in _splitting.operators:
        returns = str(getattr(original, "__annotations__", {}).get("return", ""))
        return True if "bool" in returns else f"runs at each call: {name}"
    return original(scheduler, node, *arguments, **named)


def _pretend_to_wrap() -> Callable[[], None]:
    """Have Inductor see a wrapper of partitions where a graph is split by us."""
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
    """Wrap a partition: that is done after `post_compile`, and this is never called."""
    return partition


def _somebody_wraps_partitions() -> bool:
    utils: Any = importlib.import_module("torch._inductor.utils")
    return utils._unstable_customized_partition_wrapper.wrapper is not None


def split_partitions(compiled: Any) -> list[Runnable]:
    """Return the partitions of a graph that Inductor runs without CUDA graphs, for each to be replaced in place."""
    partitions: list[Runnable] = compiled.compiled_fn_runner.partitions
    return partitions


def _is_split_around(source: str, operators: Sequence[str]) -> bool:
    """Whether generated code calls all of some operators between its partitions, and none of them within one."""
    between: set[str] = set()
    elsewhere: set[str] = set()
    is_between = False
    for line in source.splitlines():
        if line[:1].strip():  # a function or a class begins, or a statement of the module's
            is_between = line.startswith("class Runner")
        if not line.lstrip().startswith("#"):
            (between if is_between else elsewhere).update(f"{a}::{b}" for a, b in _CALL.findall(line))
    return between.issuperset(operators) and elsewhere.isdisjoint(operators)


_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.\w+)?\(")


# --- process groups ---------------------------------------------------------------------------------------------


GROUP_REQUIRED = (
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    ("torch.distributed", "Store.clone"),
    ("torch.distributed", "PrefixStore.underlying_store"),
    ("torch.distributed", "TCPStore"),
)
"""What ranks need to agree."""


@functools.cache
def missing_for_groups() -> str | None:
    """Return what this torch lacks for ranks to agree, or None; there may be no `torch.distributed` in it at all."""
    names = [f"{module}.{name}" for module, name in GROUP_REQUIRED if not _has(module, name)]
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else None


def default_store() -> Any:
    """Return the store of the default process group, which must be there."""
    return importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()


# --- what relocatable graphs need -------------------------------------------------------------------------------


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def allocator(device: torch.device) -> Allocator:
    """Return what makes an uninitialised tensor on `device` of a size, strides and a dtype, as Inductor's code does.

    For a CUDA device it has to be the current one.
    """
    if device.type == "cuda":
        fast: Any = torch._C._dynamo.guards._empty_strided_cuda
        return cast("Allocator", fast)
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


@contextlib.contextmanager
def allocations_by(allocate: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have Inductor's code that this thread runs allocate memory of a CUDA device by a function, called with what does so otherwise."""
    original: Any = torch._C._dynamo.guards._empty_strided_cuda
    mine = threading.get_ident()

    def chosen(*arguments: Any) -> torch.Tensor:
        return allocate(original, *arguments) if threading.get_ident() == mine else original(*arguments)

    codecache: Any = importlib.import_module("torch._inductor.codecache")
    modules = [vars(each) for each in list(codecache.PyCodeCache.modules)]
    names = [each for each in modules if each.get("empty_strided_cuda") is original]
    for each in names:
        each["empty_strided_cuda"] = chosen
    try:
        yield
    finally:
        for each in names:
            each["empty_strided_cuda"] = original


def reinterpret(
    tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor over `tensor`'s storage that autograd takes for no view of it; `offset` in elements of `dtype`."""
    same = tensor if tensor.dtype == dtype else tensor.view(dtype)
    return reinterpreter()(same, size, stride, offset)


Reinterpreter = Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor]


def viewed_like(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `plain`'s memory read as `like`'s is: conjugate, negative, or as it is."""
    if like.is_conj():
        plain = torch._conj(plain)
    return torch._neg_view(plain) if like.is_neg() else plain


def reinterpreter() -> Reinterpreter:
    """Return what does as `reinterpret`, for one dtype."""
    fast: Reinterpreter = torch._C._dynamo.guards._reinterpret_tensor
    return fast


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, whatever autograd thinks of them."""
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_type.setdefault(source.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    with torch.no_grad():
        for targets, sources in by_type.values():
            torch._foreach_copy_(targets, sources)


def memory_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return memory that somebody else owns as bytes."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    owned_elsewhere: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, 0, (size,), (1,)
    )
    return owned_elsewhere


_LIBTORCH = (
    ("libtorch_cpu.so", "aoti_torch_get_data_ptr"),
    ("libtorch_cpu.so", "aoti_torch__reinterpret_tensor"),
    ("libtorch_cpu.so", "aoti_torch_view_dtype"),
    ("libtorch_cpu.so", "aoti_torch_delete_tensor_object"),
    ("libtorch_python.so", "_Z16THPVariable_WrapON2at10TensorBaseE"),
)
"""What the compiled helper calls: libtorch's stable C interface, and `THPVariable_Wrap(at::TensorBase&&)`."""


@functools.cache
def missing_for_bulk() -> str | None:
    """Return why the compiled helper is of no use with this torch, or None."""
    if _handle_offset() is None:
        return f"torch {torch.__version__} keeps tensors in a way that is not known"
    names = [name for library, name in _LIBTORCH if _function(library, name) is None]
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else None


def configure_bulk(helper: Any) -> str | None:
    """Tell the compiled helper of this torch; return why it is of no use, or None."""
    functions = (_function(library, name) for library, name in _LIBTORCH)
    helper.configure(torch._C.TensorBase, _handle_offset(), *functions)
    with _without_modes_of_the_user():
        tensors = _own_tensors()
        if helper.places(tensors) != [tensor.data_ptr() for tensor in tensors]:
            return "it does not find where tensors lie"
        made: list[Any] = [None]
        helper.fill(helper.plan([(0, 0, dtype_code(torch.int16), 3, (2, 1), (1, 7))]), tensors, [], made)
        expected = reinterpret(tensors[0], torch.int16, (2, 1), (1, 7), 3)
        same = made[0].dtype == expected.dtype and all(
            getattr(made[0], name)() == getattr(expected, name)() for name in ("size", "stride", "data_ptr")
        )
    return None if same else "it does not make the tensors that it should"


@functools.cache
def _handle_offset() -> int | None:
    """Return where in a Python tensor the C++ one is, a pointer to its implementation, whose value torch tells."""
    tensors = _own_tensors()
    word = ctypes.sizeof(ctypes.c_void_p)
    for offset in range(object.__basicsize__, torch._C.TensorBase.__basicsize__ - word + 1, word):
        words = [ctypes.c_void_p.from_address(id(tensor) + offset).value for tensor in tensors]
        if words == [tensor._cdata for tensor in tensors]:
            return offset
    return None


@functools.cache
def dtype_code(dtype: torch.dtype | None) -> int:
    """Return what libtorch's stable C interface calls a dtype; -1 for None. Raises LookupError for one that it does not have."""
    if dtype is None:
        return -1
    address = _function("libtorch_cpu.so", f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")
    if address is None:
        raise LookupError(f"torch {torch.__version__} has no code for {dtype}")
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(address)())


def _function(library: str, name: str) -> int | None:
    """Return the address of a function of libtorch's."""
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / library))
        return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _own_tensors() -> list[torch.Tensor]:
    """Return tensors of several kinds, whatever modes of the user's are on."""
    with _without_modes_of_the_user():
        plain = torch.zeros(4, device="cpu")
        return [plain, plain[1:], torch.nn.Parameter(torch.zeros(2, device="cpu")), plain.clone()]


@contextlib.contextmanager
def _without_modes_of_the_user() -> Iterator[None]:
    with (
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),
        torch.utils._python_dispatch._disable_current_modes(),
    ):
        yield


def current_stream(device: torch.device) -> Callable[[], int]:
    """Return what gives the handle of a CUDA device's current stream; 0 for the CPU."""
    if device.type != "cuda":
        return int
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def stream_watch(device: torch.device) -> Callable[[], Callable[[], bool]]:
    """Return what returns, of a device's current stream, what says whether it has nothing left to do; of some that is never known."""
    return functools.partial(_watch_stream, device) if device.type == "cuda" else lambda: bool


def _watch_stream(device: torch.device) -> Callable[[], bool]:
    stream = torch.cuda.current_stream(device)
    # One that others have made, whose id is its address, may be gone by the time it is asked.
    is_others = stream.cuda_stream == stream.stream_id != 0
    return bool if is_others else functools.partial(_has_ended, stream)


def _has_ended(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        # Asking would end the capture.
        return not torch.cuda.is_current_stream_capturing() and bool(stream.query())


def graphs_share_random_state() -> bool:
    """Whether all graphs of a generator read its seed and offset at one place, and not each at its own, as from 2.13 on."""
    version: Any = torch.torch_version.TorchVersion(torch.__version__)
    return bool(version < (2, 13))


def current_device() -> Callable[[], int]:
    """Return what tells the index of the current CUDA device, in a process that uses one."""
    device: Callable[[], int] = torch._C._cuda_getDevice
    return device


def in_capture() -> Callable[[], bool]:
    """Return what says whether the current stream is being captured."""
    capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    return capturing


RELOCATION_REQUIRED = (
    ("torch", "_C._cuda_memorySnapshot"),
    ("torch", "_C._cuda_isHistoryEnabled"),
    ("torch", "_C._cuda_clearCublasWorkspaces"),
    ("torch", "_C._cuda_getCurrentRawStream"),
    ("torch", "_C._cuda_getDevice"),
    ("torch", "_C._cuda_isCurrentStreamCapturing"),
    ("torch", "_C._dynamo.guards._reinterpret_tensor"),
    ("torch", "_C._dynamo.guards._empty_strided_cuda"),
    ("torch", "_C._construct_storage_from_data_pointer"),
    ("torch._inductor.codecache", "PyCodeCache.modules"),
    ("torch", "_foreach_copy_"),
    ("torch", "_C._cuda_beginAllocateCurrentThreadToPool"),
    ("torch", "_C._cuda_endAllocateToPool"),
    ("torch", "_C._cuda_releasePool"),
    ("torch.cuda", "graph_pool_handle"),
    ("torch.cuda", "CUDAGraph.raw_cuda_graph"),
    ("torch.cuda", "CUDAGraph.register_generator_state"),
    ("torch.cuda.memory", "_record_memory_history"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._python_dispatch", "_push_mode"),
    ("torch.utils._python_dispatch", "_pop_mode"),
)
"""What relocatable graphs need beside `REQUIRED`; a torch without CUDA has little of it."""


@functools.cache
def missing_for_relocation() -> str | None:
    """Return what this torch lacks for relocatable graphs, or None."""
    names = [f"{module}.{name}" for module, name in RELOCATION_REQUIRED if not _has(module, name)]
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else None


def history_is_recorded() -> bool:
    """Whether the user has an allocator, the GPU's or (2.14) that of pinned memory, record what it does."""
    if torch._C._cuda_isHistoryEnabled():
        return True
    return any(torch._C._cuda_memorySnapshot(None).get("host_traces", ()))


Pool = tuple[int, int]
"""What names a pool of the allocator's."""


@contextlib.contextmanager
def capturing(
    graph: Any, device_index: int, pool: Pool, generators: Sequence[torch.Generator] = ()
) -> Iterator[None]:
    """Capture what runs on the current stream into `graph`, while this thread allocates from `pool` alone.

    What is captured may draw from `generators` beside the device's own. `pool` has a user more in the end, for the caller to take away by `release_pool`. If the capture fails, nothing of it is
    left with the allocator.
    """
    own_pool = torch.cuda.graph_pool_handle()  # the graph's own, which nothing is allocated from
    ended = False
    begun_with = _default_state(device_index) if generators else None
    try:
        _begin_capture(graph, generators, pool=own_pool)
        try:
            # Of several pools that ask for an allocation the last to begin gets it.
            torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(device_index, pool)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it would hide what went wrong first
                graph.capture_end()
                ended = True
            raise
        graph.capture_end()
        ended = True
    finally:
        if begun_with is not None:
            # An operator that fails while it draws from another generator leaves that in the place of the device's own.
            torch.cuda.default_generators[device_index].graphsafe_set_state(begun_with)
        if not ended:
            _clean_up_after_capture(graph, device_index, own_pool, generators)


def _default_state(device_index: int) -> Any:
    return torch.cuda.default_generators[device_index].graphsafe_get_state()


def _begin_capture(graph: Any, generators: Sequence[torch.Generator] = (), **options: Any) -> None:
    """Begin to capture the current stream, and leave nothing to be done on it.

    Up to 2.12 that writes the generator's seed and offset there, by a kernel each, which nobody reads: a replay writes them again. From the seventh
    kernel on that a process has had on other streams than the default one, all of its graphs take the GPU 0.2 to 0.35 us a node longer,
    for good (H200, driver 580).
    """
    modes: Any = torch.utils._python_dispatch
    modes._push_mode(_NothingFilled())  # to enter it would tell other threads, too
    try:
        for each in generators:
            graph.register_generator_state(each)
        graph.capture_begin(capture_error_mode="thread_local", **options)
    finally:
        modes._pop_mode()


class _NothingFilled(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Leaves tensors that are to be filled with a number as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))


_failed_captures: list[Any] = []
"""Kept for good: up to 2.13 the allocator of pinned memory may still ask them whether a stream is being captured."""


def _clean_up_after_capture(
    graph: Any, device_index: int, pool: Pool, generators: Sequence[torch.Generator]
) -> None:
    """Undo what `capture_begin` has done and a failing `capture_end` has not."""
    _failed_captures.append(graph)
    # Up to 2.12 the pool stays open, which is fatal when the allocator next frees its cache, and nobody releases it. Later
    # versions close it themselves: then this raises RuntimeError at once.
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)
    # Up to 2.12 generators go on to believe that they are being captured, and every random number raises. A capture that
    # succeeds puts that right.
    with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device_index)):
        something = torch.empty(1, device=torch.device("cuda", device_index))
        torch.cuda.synchronize(device_index)
        healing = torch.cuda.CUDAGraph()
        _begin_capture(healing, generators)
        something.fill_(1)
        healing.capture_end()
        healing.reset()


def release_pool(device_index: int, pool: Pool) -> None:
    """Have the memory of a pool be given back when the allocator next empties its cache, as far as it is free."""
    torch._C._cuda_releasePool(device_index, pool)


def empty_cache() -> None:
    """Give what the allocator keeps back to the driver; if another thread captures, it does so when it needs memory."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


AllocatorEvents = Callable[[], list[tuple[str, int, int]]]


@contextlib.contextmanager
def allocation_history(device_index: int, pool: Pool) -> Iterator[AllocatorEvents]:
    """Have the allocator record what it does; yields what returns its events in `pool` so far, as (action, address, bytes)."""

    def events() -> list[tuple[str, int, int]]:
        snapshot = torch._C._cuda_memorySnapshot(None)
        ours = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in snapshot["segments"]
            if segment["device"] == device_index and tuple(segment["segment_pool_id"]) == tuple(pool)
        )
        starts, ends = [start for start, _ in ours], [0, *(end for _, end in ours)]
        return [
            (event["action"], event["addr"], event["size"])
            for event in snapshot["device_traces"][device_index]
            # Thousands of events, and a hundred segments in a large model.
            if event.get("addr", 0) < ends[bisect.bisect_right(starts, event.get("addr", 0))]
        ]

    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all", context=None, stacks="python", clear_history=True)
    try:
        yield events
    finally:
        record(enabled=None, clear_history=True)


def clear_workspaces() -> None:
    """Have the BLAS libraries give back their workspaces."""
    torch._C._cuda_clearCublasWorkspaces()
