"""Tells whether a profiler of torch runs or is being made ready, and names a range in its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAG = "_is_profiler_enabled"
_PREPARE, _DISABLE = "_prepare_profiler", "_disable_profiler"


def profiler_flag() -> tuple[dict[str, Any], str]:
    """Return a dict and its key that is True while `torch.profiler`, `emit_nvtx` or `emit_itt` runs: reading it takes 10 ns."""
    return vars(torch.autograd.profiler), _FLAG


class _Preparation:
    """Whether torch has prepared a profiler, as for the warm-up of a schedule, and none has ended since: CUPTI is at work before the flag is set."""

    is_ready = False


_preparation = _Preparation()


def watch_profiler() -> Callable[[], None]:
    """Notice from now on when a profiler is made ready, as it is for the warm-up of a schedule; return a function that undoes this."""
    profiler: Any = torch.autograd.profiler
    prepare, disable = (getattr(profiler, name, None) for name in (_PREPARE, _DISABLE))
    if prepare is None or disable is None:
        return lambda: None

    is_watching = True

    def prepared(*arguments: Any, **options: Any) -> Any:
        _preparation.is_ready = is_watching
        try:
            return prepare(*arguments, **options)
        except BaseException:
            _preparation.is_ready = False
            raise

    def disabled(*arguments: Any, **options: Any) -> Any:
        try:
            return disable(*arguments, **options)
        finally:
            _preparation.is_ready = False

    def undo() -> None:
        nonlocal is_watching  # others may have wrapped one of ours, which then stays
        is_watching = _preparation.is_ready = False
        for name, ours, theirs in ((_PREPARE, prepared, prepare), (_DISABLE, disabled, disable)):
            if getattr(profiler, name) is ours:
                setattr(profiler, name, theirs)

    setattr(profiler, _PREPARE, prepared)
    setattr(profiler, _DISABLE, disabled)
    return undo


def is_profiled() -> bool:
    """Return whether a profiler runs in this process or, if `watch_profiler` was called, has been made ready."""
    return getattr(torch.autograd.profiler, _FLAG, False) is True or _preparation.is_ready


def named(run: Callable[[list[Any]], Any], name: str) -> Callable[[list[Any]], Any]:
    """Return a callable that calls `run` within a range of the trace, which on a GPU also spans the kernels launched in it."""

    def call(inputs: list[Any]) -> Any:
        with torch.autograd.profiler.record_function(name):
            return run(inputs)

    return call
