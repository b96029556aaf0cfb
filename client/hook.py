"""The entry points: `enable()`, `disable()`, and the backend "pygraph" of `torch.compile`."""

from __future__ import annotations

import atexit
import importlib
from typing import TYPE_CHECKING, Any

from pygraphd.client.frontend.installation import COMPILE_FX, Hook

if TYPE_CHECKING:
    from collections.abc import Mapping

_hook = Hook()
atexit.register(lambda: _hook.close())


def enable(*, torch_is_new: bool = False) -> None:
    """Have PyGraph decide how every graph runs that is compiled from now on, in this process; see `pygraphd.enable` and `Hook.enable`."""
    _hook.enable(torch_is_new=torch_is_new)


def disable() -> None:
    """Leave later compilations to PyTorch; see `pygraphd.disable`."""
    _hook.disable()


def backend(
    graph: Any, example_inputs: Any, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """Compile as backend "inductor" does, with PyGraph deciding how each graph runs: `torch.compile(backend="pygraph")`."""
    from pygraphd.client.backend import torch_private

    _hook.enable(everything=False)
    importlib.import_module(COMPILE_FX)  # the hook waits for it; later, the first graph would have no passes
    with _hook.in_backend():
        options = _hook.with_placement(options)
        return torch_private.compile_with_inductor(graph, example_inputs, mode, options)
