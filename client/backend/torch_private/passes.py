"""Adds a graph pass to Inductor's, keys its caches by the pass, and says what is being compiled while the pass runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pygraphd.client.backend.torch_private.autograd import keep_saved
from pygraphd.client.backend.torch_private.inductor import inductor_config

if TYPE_CHECKING:
    import contextlib


FILES = tuple(str(each) for each in sorted(Path(__file__).parent.glob("*.py")))
"""The files of this package, for the keys of Inductor's caches: other code may have compiled another graph."""

PASS_OPTION = "post_grad_custom_pre_pass"
"""Inductor's option for the pass; it holds one, or from 2.13 on several."""

GraphPass = Callable[[torch.fx.Graph], None]


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
                keep_saved(graph)

        def uuid(self) -> Any:
            uuids = [each.uuid() if isinstance(each, module.CustomGraphPass) else None for each in earlier]
            if not all(uuids):
                return None  # as with theirs alone, nothing is cached
            return (*uuids, own, is_for_export(), *split_by) if self.active else (*uuids,)

        def __deepcopy__(self, memo: object) -> Passes:
            return self  # each thread takes a copy of a default, which is to be this one

    return Passes()


def add_pass(run: GraphPass, files: Sequence[str]) -> Callable[[], None]:
    """Have Inductor run a pass over each graph before it lowers it, after the user's; return what takes it out again."""
    config = inductor_config()
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
    return getattr(inductor_config(), PASS_OPTION)


_EXPORTING = frozenset({"standalone_compile", "aot_compile", "aot_compile_fullgraph", "compile_fx_aot"})
"""Functions that make what is compiled within them something to be saved, and loaded by programs without us."""


def is_for_export() -> bool:
    """Whether what is being compiled may run in a program that knows nothing of operators of ours, or is no Python."""
    config, functorch = inductor_config(), importlib.import_module("torch._functorch.config")
    virtualized: Any = importlib.import_module("torch._inductor.virtualized")
    if config.cpp_wrapper or virtualized.V.aot_compilation is True:
        return True
    if getattr(functorch, "bundled_autograd_cache", False):  # of `caching_precompile`, for one
        return True
    frame = cast("Any", sys._getframe(1))
    while frame is not None and frame.f_code.co_name not in _EXPORTING:
        frame = frame.f_back
    return frame is not None


def has_frozen_values(module: Any) -> bool:
    """Whether parameters are constants of a graph: then what is made of them must not outlive them in Inductor's caches."""
    return bool(getattr(module, "_has_frozen_params", False))


def without_modes() -> contextlib.AbstractContextManager[object]:
    """Return what has operators compute, although a graph is being traced or compiled."""
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


split_by: tuple[str, ...] = ()
"""What decides where graphs are split, for the keys of Inductor's caches; empty: they are not."""
