"""Tells whether a profiler of torch runs, is being made ready, or did in the past, and names a range in its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAG = "_is_profiler_enabled"
_PREPARE, _DISABLE = "_prepare_profiler", "_disable_profiler"


_READY = "is_ready"


class _Profiles:
    """What is known of the profiles of this process."""

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {_READY: False}
        """Whether torch has prepared a profiler, as for the warm-up of a schedule, and none has ended since: CUPTI is at work before torch's flag is set."""
        self.were = False
        """Whether torch has ever prepared a profiler."""


_profiles = _Profiles()


def profiler_flags() -> tuple[dict[str, Any], str, dict[str, Any], str]:
    """Return two dicts and their keys: one is True while a profiler runs, the other while it is ready. Reading them takes 10 ns each."""
    return vars(torch.autograd.profiler), _FLAG, _profiles.flags, _READY


def watch_profiler() -> Callable[[], None]:
    """Notice from now on when a profiler is made ready, as it is for the warm-up of a schedule; return a function that undoes this."""
    profiler: Any = torch.autograd.profiler
    prepare, disable = (getattr(profiler, name, None) for name in (_PREPARE, _DISABLE))
    if prepare is None or disable is None:
        _profiles.were = True  # who cannot tell has to expect it
        return lambda: None

    is_watching = True

    def prepared(*arguments: Any, **options: Any) -> Any:
        _profiles.flags[_READY] = is_watching
        _profiles.were |= is_watching
        try:
            return prepare(*arguments, **options)
        except BaseException:
            _profiles.flags[_READY] = False
            raise

    def disabled(*arguments: Any, **options: Any) -> Any:
        try:
            return disable(*arguments, **options)
        finally:
            _profiles.flags[_READY] = False

    def undo() -> None:
        nonlocal is_watching  # others may have wrapped one of ours, which then stays
        is_watching = _profiles.flags[_READY] = False
        for name, ours, theirs in ((_PREPARE, prepared, prepare), (_DISABLE, disabled, disable)):
            if getattr(profiler, name) is ours:
                setattr(profiler, name, theirs)

    setattr(profiler, _PREPARE, prepared)
    setattr(profiler, _DISABLE, disabled)
    return undo


def is_profiled() -> bool:
    """Return whether a profiler runs in this process or, if `watch_profiler` was called, has been made ready."""
    return getattr(torch.autograd.profiler, _FLAG, False) is True or _profiles.flags[_READY]


def was_profiled() -> bool:
    """Return whether a profiler has run, or has been made ready, since `watch_profiler` was first called; True also if this torch does not tell."""
    return _profiles.were


def named(run: Callable[[list[Any]], Any], name: str) -> Callable[[list[Any]], Any]:
    """Return a callable that calls `run` within a range of the trace, which on a GPU also spans the kernels launched in it."""

    def call(inputs: list[Any]) -> Any:
        with torch.autograd.profiler.record_function(name):
            return run(inputs)

    return call
