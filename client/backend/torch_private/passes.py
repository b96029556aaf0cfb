"""Adds a graph pass to Inductor, and answers questions of the pass about the graph that is being compiled."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pygraphd.client.backend.torch_private.autograd import keep_saved, returned_outputs
from pygraphd.client.backend.torch_private.inductor import inductor_config

if TYPE_CHECKING:
    import contextlib


FILES = tuple(str(each) for each in sorted(Path(__file__).parent.glob("*.py")))
"""The files of this package. Their hash is part of the keys of Inductor's caches, since other code may compile a graph otherwise."""

split_by: tuple[str, ...] = ()
"""The hash of the code that splits graphs, and the operators that the user vouches for, for cache keys; empty: graphs are not split."""

PASS_OPTION = "post_grad_custom_pre_pass"
"""Inductor's option for graph passes. It holds one pass; from torch 2.13 on it may hold a list."""

GraphPass = Callable[[torch.fx.Graph], None]


def pass_after(before: Any, run: GraphPass, files: Sequence[str]) -> Any:
    """Return a graph pass for Inductor that runs `before`, the user's or None, and then `run` while it is `active`.

    `files` hold the code of `run`; their hash is part of the keys of Inductor's caches. Raises TypeError if a pass of the user takes more
    arguments than the graph.
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
                keep_saved(graph)

        def uuid(self) -> Any:
            uuids = [each.uuid() if isinstance(each, module.CustomGraphPass) else None for each in earlier]
            if not all(uuids):
                return None  # as with the user's passes alone, nothing is cached
            return (*uuids, own, is_for_export(), returned_outputs(), *split_by) if self.active else (*uuids,)

        def __deepcopy__(self, memo: object) -> Passes:
            return self  # each thread copies the default of an option, and must share this pass

        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            # A compiled module is saved with all options of Inductor, and is to be loaded where PyGraph is not installed.
            if isinstance(before, list | tuple):
                return list, ([*earlier],)
            return (type(None), ()) if before is None else (operator.getitem, ([before], 0))

    return Passes()


def add_pass(run: GraphPass, files: Sequence[str]) -> Callable[[], None]:
    """Have Inductor run a pass over each graph before lowering, after the user's passes; return a function that removes it."""
    config = inductor_config()
    # From torch 2.12 on an option is set for one thread. Backwards are compiled in other threads, which read the default.
    entry = config._config[PASS_OPTION]
    default, before = entry.default, getattr(config, PASS_OPTION)
    everywhere = pass_after(default, run, files)
    here = everywhere if before is default else pass_after(before, run, files)
    entry.default = everywhere
    setattr(config, PASS_OPTION, here)

    def remove() -> None:
        everywhere.active = here.active = False  # other threads may hold them for good
        if entry.default is everywhere:
            entry.default = default
        # A pass that the user has set since stays.
        if getattr(config, PASS_OPTION) in (here, everywhere):
            setattr(config, PASS_OPTION, before)

    return remove


def is_added(graph_pass: Any) -> bool:
    """Return whether a graph pass was made by `pass_after`, and is active."""
    return getattr(graph_pass, "is_of_pygraph", False) and bool(graph_pass.active)


def current_pass() -> Any:
    """Return the graph pass that Inductor runs in this thread, or None."""
    return getattr(inductor_config(), PASS_OPTION)


def is_for_package() -> bool:
    """Return whether the graph that is being compiled goes into a package of AOTInductor, whose buffers may be replaced by name."""
    virtualized: Any = importlib.import_module("torch._inductor.virtualized")
    return virtualized.V.aot_compilation is True


_EXPORTING = frozenset({"standalone_compile", "aot_compile", "aot_compile_fullgraph", "compile_fx_aot"})
"""Functions of torch that compile a graph to be saved, and to be loaded by programs that may not have PyGraph."""


def is_for_export() -> bool:
    """Return whether the compiled graph may be loaded by a program without PyGraph's operators, or without Python."""
    if inductor_config().cpp_wrapper or is_for_package():
        return True
    functorch = importlib.import_module("torch._functorch.config")
    if getattr(functorch, "bundled_autograd_cache", False):  # of `caching_precompile`, for one
        return True
    frame = cast("Any", sys._getframe(1))
    while frame is not None and frame.f_code.co_name not in _EXPORTING:
        frame = frame.f_back
    return frame is not None


def has_frozen_values(module: Any) -> bool:
    """Return whether parameters are constants of the graph. Values computed from them must not get into Inductor's caches."""
    return bool(getattr(module, "_has_frozen_params", False))


def without_modes() -> contextlib.AbstractContextManager[object]:
    """Return a context in which operators compute values, although a graph is being traced or compiled."""
    modes: Any = importlib.import_module("torch.utils._python_dispatch")
    without: contextlib.AbstractContextManager[object] = modes._disable_current_modes()
    return without


def fake_on(device: torch.device, like: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the layout of another, on another device."""
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    mode: Any = like.fake_mode
    layout = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    made: torch.Tensor = fake.FakeTensor(mode, layout, device)
    return made
