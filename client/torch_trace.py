"""A profile of one step by `torch.profiler`, in a process of which nobody knows what else it does. See `step_profile.py`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import profiler

from pygraphd.client import _torch
from pygraphd.client.policy import NO_DEVICE
from pygraphd.client.step_profile import OTHER_PROFILER, NoTraceError

if TYPE_CHECKING:
    from collections.abc import Callable

_QUIET = "KINETO_LOG_LEVEL"
_SETTINGS = {
    # Graphs that were made before CUPTI is taken down and set up again may crash the process.
    "DISABLE_CUPTI_LAZY_REINIT": "1",
    "TEARDOWN_CUPTI": "0",
    _QUIET: "6",  # it prints when it begins and ends
}
LOST = "the profiler had no room for all of the step"
IN_BACKWARD = "a backward is under way, and with it what a profiler keeps for a thread comes and goes"
IN_CAPTURE = "a capture is under way"


class TorchTrace:
    """By `torch.profiler`, of the current device."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._folder: Path | None = None
        self._pid = 0
        self._set: list[str] = []
        self._is_at_it = False

    def watch_others(self, before: Callable[[], None]) -> Callable[[], None]:
        """Have `before` be called before any profiler but this begins; return what ends that."""
        return _torch.around_profilers(lambda: None if self._is_at_it else before())

    def why_not(self) -> str | None:
        """See `Trace`."""
        if _torch.in_backward():
            return IN_BACKWARD
        return IN_CAPTURE if _torch.is_capturing() else None

    def begin(self) -> None:
        """See `Trace`."""
        # Whoever has not set CUDA up may be about to fork.
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            raise NoTraceError(NO_DEVICE)
        if _torch.profiler_is_on():  # since before there was anything to be told of it
            raise NoTraceError(OTHER_PROFILER)
        self._set = [name for name in _SETTINGS if name not in os.environ]
        os.environ.update({name: _SETTINGS[name] for name in self._set})
        self._folder, self._pid = Path(tempfile.mkdtemp(prefix="pygraph-trace-")), os.getpid()
        _end_in_children(self)
        self._profile = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA],
            schedule=profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            acc_events=True,  # it warns otherwise that there is one cycle only
            on_trace_ready=lambda done: done.export_chrome_trace(str(self._file)),
        )
        self._do(self._profile.start)
        # Without this it makes a Python object of each event, in the user's call.
        self._profile.profiler.acc_events = False

    def keep(self) -> None:
        """See `Trace`."""
        self._do(self._profile.step)

    def end(self) -> list[dict[str, Any]]:
        """See `Trace`."""
        self._do(self._profile.step)
        if _torch.profiler_has_stopped():
            raise NoTraceError(LOST)
        events: list[dict[str, Any]] = json.loads(self._file.read_text())["traceEvents"]
        return events

    def close(self) -> None:
        """See `Trace`."""
        profile, self._profile = self._profile, None
        folder, self._folder = self._folder, None
        try:
            if profile is not None and self._pid == os.getpid():
                profile.on_trace_ready = None
                self._do(profile.stop)
        finally:
            # What the process starts is not meant. That CUPTI stays is, for good.
            for name in {_QUIET}.intersection(self._set):
                os.environ.pop(name, None)
            # It waits for the GPU first, which may have failed; but a process that exits with a profiler on crashes.
            if profile is not None:
                _torch.end_profiler()
            if folder is not None and self._pid == os.getpid():
                shutil.rmtree(folder, ignore_errors=True)

    def forget(self) -> None:
        """In a forked child: let the parent's profile be."""
        if self._profile is not None:
            self._profile = None
            _torch.end_profiler()

    def _do(self, what: Callable[[], object]) -> None:
        self._is_at_it = True
        try:
            torch.cuda.synchronize()
            what()
        finally:
            self._is_at_it = False

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return self._folder / "trace.json"


def _end_in_children(trace: TorchTrace) -> None:
    """A child that is forked during the profile would go on with it for ever."""
    reference = weakref.ref(trace)

    def forget() -> None:
        if (found := reference()) is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)
