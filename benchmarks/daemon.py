"""A pygraphd of a benchmark's own, in a folder of its own, through its command line only."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Self

from benchmarks.errors import BenchmarkError
from benchmarks.processes import run_fresh

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TIMEOUT_S = 60.0
_ATTEMPTS = 6


class Daemon:
    """A daemon that runs from `with` to the end of the block. Its files lie in `home`, and stay there."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            with contextlib.suppress(BenchmarkError):
                self._command("stop")  # it may have come up all the same; the first error counts
            raise
        return self

    def _start(self) -> None:
        # Beside dozens of processes that import torch, starting takes longer than the command waits.
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(BenchmarkError):
                self._command("start")
                return
        self._command("start")

    def __exit__(self, *_: object) -> None:
        self._command("stop")

    def _command(self, verb: str) -> None:
        # -P and a neutral folder: the repository's `alembic` folder must not hide the library of that name.
        # Without the decisions that the package ships: an empty cache is to be empty.
        own = {"PYGRAPHD_HOME": str(self.home), "PYGRAPHD_AUTOSTART": "0", "PYGRAPHD_SHIPPED": "0"}
        environ = {**without_product(os.environ), **own}
        outcome = run_fresh(["-P", "-m", "pygraphd", verb], environ, _TIMEOUT_S, folder=self.home)
        if outcome.error:
            raise BenchmarkError(f"python -m pygraphd {verb}: {outcome.error}")


def without_product(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that are not PyGraph's."""
    return {name: value for name, value in environ.items() if not name.startswith("PYGRAPH")}
