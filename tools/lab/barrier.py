"""Processes that compile side by side and are measured one after the other: most of a benchmark's time is compiling.

Each one says when it has compiled, waits until all have, and then runs alone until it has been timed: nothing else works on the GPU or, but
for the daemons of the product, on the CPU meanwhile. What is left to do then, checks and profiles, begins when all have been timed.
Of those that share what they compile, one compiles first, and the others find it done: they run the same kernels.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from types import TracebackType

VARIABLE = "BENCHMARK_BARRIER"
"""For a child: the file that says that it is ready."""
THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
"""Of Inductor's: with one, it starts no processes to compile in."""
VECTORS_VARIABLE = "TORCHINDUCTOR_VEC_ISA_OK"
"""Inductor's: with 1, it trusts the CPU's flags for vector instructions, and compiles no test program."""
AFTER_VARIABLE = "BENCHMARK_AFTER"
"""For a child: the file that says so of the one that compiles before it."""
_EXPECTED = "expected"
_HELD = "held"
_LOCK = "lock"
_READY = ".ready"
_TIMED = ".timed"
_GAVE_UP = ".gave-up"
AFTERWARDS_VARIABLE = "BENCHMARK_AFTERWARDS"
"""For a child: the most processes that check and profile side by side, as eager mode takes more memory of the GPU."""
_AFTERWARDS = 4
LIMIT_VARIABLE = "BENCHMARK_LIMIT_S"
"""For a child: the seconds after which it gives up, rather than have others wait for it: to compile, to be timed, to check. Unset: never."""
_POLL_S = 0.05


class Barrier:
    """The parent's side: a folder that processes meet in, each given as (its name, what it shares when it compiles; None: nothing).

    They are timed in this order: where the time runs out, some workloads have been timed as all variants, rather than all as some.
    `environ` is what all of them get beside what they need for that; they have so many `cores`, or all of this process's. With `held`
    none is timed before `admit`.
    """

    def __init__(
        self,
        folder: Path,
        expected: Sequence[tuple[str, Hashable]],
        environ: Mapping[str, str] = MappingProxyType({}),
        cores: int | None = None,
        *,
        held: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The first name stands for a process that is never started: all wait for its marks until `admit`
        # makes them.
        names = [*([_HELD] if held else []), *(name for name, _ in expected)]
        (folder / _EXPECTED).write_text("\n".join(names))
        self._folder = folder
        self._environ = environ
        self._after: dict[str, Path] = {}
        first: dict[Hashable, str] = {}
        # Of processes that share what they compile, only the first starts a pool to compile in. So cores are
        # shared out among groups, not among processes.
        side_by_side = max(1, len({shared for _, shared in expected} - {None}))
        self._threads = max(1, (cores or len(os.sched_getaffinity(0))) // side_by_side)
        for name, shared in expected:
            if shared is not None and first.setdefault(shared, name) != name:
                self._after[name] = self._file(first[shared])

    def admit(self) -> None:
        """Let processes be timed that were held back until other work on their GPU has ended."""
        _pass(self._file(_HELD))

    def all_timed(self) -> bool:
        """Whether all processes have been timed, or have ended."""
        return all((self._folder / f"{name}{_TIMED}").exists() for name in _expected(self._folder))

    def place(self, name: str) -> Place:
        """Return the place of one of the processes.

        Those that come later find most of it compiled, and need no pool of processes for the rest.
        """
        after = self._after.get(name)
        # Both change how long compiling takes. Beside other processes that time says nothing in any case.
        told = {THREADS_VARIABLE: str(1 if after else self._threads), VECTORS_VARIABLE: "1"}
        environ = {name: os.environ.get(name) or value for name, value in told.items()}
        return Place(self._file(name), after, {**environ, **self._environ})

    def _file(self, name: str) -> Path:
        return self._folder / (name + _READY)


class Place:
    """One process's place, to be held (`with`) as long as it runs: the others do not wait for one that has ended."""

    def __init__(self, file: Path, after: Path | None, environ: Mapping[str, str]) -> None:
        self.environ = {**environ, VARIABLE: str(file), **({AFTER_VARIABLE: str(after)} if after else {})}
        self.comes_later = after is not None
        """Whether another process compiles the same before."""
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        _pass(self._file)


def wait_to_compile() -> None:
    """Return when this process may compile: at once, unless one that it shares with compiles before it.

    Raises TimeoutError if that one has given up: this one would take as long.
    """
    parent = os.getppid()
    while (name := os.environ.get(AFTER_VARIABLE)) and not Path(name).exists():
        _end_with(parent)
        time.sleep(_POLL_S)
    # Asked after the wait: a process that gives up says so before the mark is made that ends the wait.
    if name and _gave_up(Path(name)).exists():
        raise TimeoutError("the process that was to compile the same before it has given up")


def give_up() -> None:
    """Have no process compile what this one has not compiled in time."""
    if name := os.environ.get(VARIABLE):
        _gave_up(Path(name)).touch()


class Turn:
    """The time in which this process is the only one that is measured: until `end`, or until the process ends."""

    def __init__(self, file: Path) -> None:
        """Wait for the turn; `file` says that this process is ready."""
        self._file, self._parent = file, os.getppid()
        file.touch()
        names = _expected(file.parent)
        # All have to have compiled before the first is timed: the compiler uses the cores, and first steps
        # use the GPU.
        self._wait_for(names, _READY)
        self._wait_for(names[: names.index(file.name.removesuffix(_READY))], _TIMED)

    def end(self) -> None:
        """Let the next one be measured, and return when all have been, and few work beside this process."""
        _timed(self._file).touch()
        self._wait_for(_expected(self._file.parent), _TIMED)
        most = int(os.environ.get(AFTERWARDS_VARIABLE, _AFTERWARDS))
        # Locks, and no counter in a file: the kernel gives up the lock of a process that is killed, too.
        locks = [_open(self._file.parent / f"{_LOCK}.{number}") for number in range(most)]
        while not any(map(_locked, locks)):  # held until the process ends
            self._wait()

    def _wait_for(self, names: Sequence[str], suffix: str) -> None:
        for name in names:
            while not (self._file.parent / f"{name}{suffix}").exists():
                self._wait()

    def _wait(self) -> None:
        _end_with(self._parent)
        time.sleep(_POLL_S)


def wait_for_turn() -> Turn | None:
    """Return the turn of this process when all have compiled, and no other is measured; None at once without a barrier."""
    name = os.environ.get(VARIABLE)
    return Turn(Path(name)) if name else None


def _pass(ready: Path) -> None:
    """Have nobody wait for the process of this file any more."""
    ready.parent.mkdir(parents=True, exist_ok=True)
    # Both marks, however far the process came: the others wait for the first of all processes, and for the
    # second of those before them.
    ready.touch()
    _timed(ready).touch()


def _expected(folder: Path) -> list[str]:
    """Return the names of the processes, in the order in which they are timed."""
    return (folder / _EXPECTED).read_text().split("\n")


def _gave_up(ready: Path) -> Path:
    return ready.with_name(ready.name.removesuffix(_READY) + _GAVE_UP)


def _timed(ready: Path) -> Path:
    return ready.with_name(ready.name.removesuffix(_READY) + _TIMED)


def _open(file: Path) -> int:
    lock = os.open(file, os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, False)
    return lock


def _locked(lock: int) -> bool:
    """Try to get a lock, which is held until it is closed or this process ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_with(parent: int) -> None:
    # A process whose parent has died is given another one. It would wait for ever for marks that nobody
    # makes.
    if os.getppid() != parent:
        raise SystemExit("whoever started this benchmark process has gone")
