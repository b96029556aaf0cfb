"""Processes that are watched: one that prints into a log as it goes, and several whose ends are waited for."""

from __future__ import annotations

import sys
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, TypeVar

from benchmarks.processes import ROOT, Outcome, error_of, start, wait_for

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

T = TypeVar("T")

_LOOK_S = 0.2


def run_logged(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    log: Path,
    grace_s: float,
    stop: threading.Event | None = None,
) -> Outcome:
    """Do as `run_fresh`, with the output in `log` as it comes.

    A late process gets a SIGTERM first, so that it can end its own children; `grace_s` seconds later it is killed.
    """
    with log.open("w") as stream:
        code = wait_for(start([sys.executable, *arguments], environ, ROOT, stream), timeout_s, stop, grace_s)
    output = log.read_text(errors="replace")
    return Outcome(error_of(code, timeout_s, stop, output), output)


def as_ended(running: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Yield futures as they end, like `as_completed`, to a main thread that can be interrupted meanwhile.

    Python handles signals in the main thread, and one that the kernel gave to another thread does not wake it.
    """
    pending = set(running)
    while pending:
        ended, pending = wait(pending, _LOOK_S, FIRST_COMPLETED)
        yield from ended
