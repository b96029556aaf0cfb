"""Tells whether a profiler of torch runs, is being made ready, or did in the past, and names a range in its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAG = "_is_profiler_enabled"
_PREPARE, _DISABLE = "_prepare_profiler", "_disable_profiler"
_READY = "is_ready"
_OF_RANGES = frozenset({"NVTX", "ITT"})
"""Types of the profilers that `emit_nvtx` and `emit_itt` run, which attach no CUPTI."""


class _Profiles:
    """The profiles of this process, as far as `watch_profiler` notices them."""

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {_READY: False}
        """Whether torch has prepared a profiler and none has ended since: CUPTI is at work before torch's own flag is set."""
        self.were_prepared = False
        """Whether torch has ever prepared a profiler, or may have."""
        self.are_watched = False


_profiles = _Profiles()


def profiler_flags() -> tuple[dict[str, Any], str, dict[str, Any], str]:
    """Return two dicts and their keys: one is True while a profiler runs, the other while it is ready. Reading them takes 10 ns each."""
    return vars(torch.autograd.profiler), _FLAG, _profiles.flags, _READY


def watch_profiler(*, sees_all: bool) -> None:
    """Notice from now on when torch prepares a profiler, as it does for the warm-up of a schedule.

    Not undone, since compiled graphs run on without the hook. Unless it `sees_all`, as while torch is imported, there may have been a
    profile before.
    """
    if _profiles.are_watched:
        return
    _profiles.are_watched = True
    profiler: Any = torch.autograd.profiler
    prepare, disable = (getattr(profiler, name, None) for name in (_PREPARE, _DISABLE))
    if prepare is None or disable is None:
        _profiles.were_prepared = True
        return
    _profiles.were_prepared |= not sees_all

    def prepared(*arguments: Any, **options: Any) -> Any:
        flags = _profiles.flags
        # Before the call, in which CUPTI is attached: another thread may be about to record.
        before, flags[_READY] = flags[_READY], True
        _profiles.were_prepared = True
        try:
            return prepare(*arguments, **options)
        except BaseException:
            flags[_READY] = before
            raise

    def disabled(*arguments: Any, **options: Any) -> Any:
        # Asked before, since none runs afterwards. Ranges that end in a warm-up must not end the warm-up.
        ends_profile = _type_of_profiler() not in _OF_RANGES
        try:
            return disable(*arguments, **options)
        finally:
            if ends_profile:
                _profiles.flags[_READY] = False

    # `torch.autograd.profiler.profile` calls both by these global names of its module.
    setattr(profiler, _PREPARE, prepared)
    setattr(profiler, _DISABLE, disabled)


def _type_of_profiler() -> str | None:
    """Return the name of the type of the profiler that runs; None if torch does not tell."""
    tell = getattr(torch._C._autograd, "_profiler_type", None)
    return getattr(tell(), "name", None) if tell is not None else None


def is_profiled() -> bool:
    """Return whether a profiler runs in this process or, if `watch_profiler` was called, has been prepared."""
    return getattr(torch.autograd.profiler, _FLAG, False) is True or _profiles.flags[_READY]


def was_profiled() -> bool:
    """Return whether torch has ever prepared a profiler, or may have unnoticed. `emit_nvtx` and `emit_itt` prepare none."""
    return _profiles.were_prepared


def named(run: Callable[[list[Any]], Any], name: str) -> Callable[[list[Any]], Any]:
    """Return a callable that calls `run` within a range of the trace, which on a GPU also spans the kernels launched in it."""

    def call(inputs: list[Any]) -> Any:
        with torch.autograd.profiler.record_function(name):
            return run(inputs)

    return call
