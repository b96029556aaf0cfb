"""Runs one client as one variant in a process of its own, and reads its output and PyGraph's summary.

Processes of a client compile side by side, and are timed one at a time: each says when it has compiled, and waits for its turn. A turn ends
when the process says that it has been timed, or has ended. `examples/clients/measuring.py` has the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon
from benchmarks.errors import BenchmarkError
from benchmarks.processes import last_exception, run_fresh
from benchmarks.trial import NO_SUMMARY, plain_environment, product_environment, read_summary
from benchmarks.variants import Compile, Variant
from tools.lab.clients.catalogue import Client
from tools.lab.clients.records import ClientRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.processes import Outcome

VARIABLE = "MEASURING_TURN"
"""For a process: the file whose neighbours say whose turn it is."""
_POLL_S = 0.05
_EXIT_S = 30.0
RESULT = "RESULT "
# torch.distributed puts the rank before each line of an exception that nobody has caught.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_FATAL = "Fatal Python error: "
_MAX_LINE = 300
_GRACE_S = 6.0
_LONGEST_S = 3600.0
"""No limit: a process is stopped when its turn is late."""
_FIGURES = (
    *("step_ms", "first_step_s", "steps", "reserved_mb", "allocated_mb"),
    *("checks", "tolerance", "eager_tolerance"),
)
_FROM_SUMMARY = ("deployed", "nodes_in_graphs", "reasons", "fallbacks", "failures")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of all processes, which have `compile_s` seconds to compile side by side, and `timed_s` for the steps that follow alone."""

    steps: int
    tiny: bool
    compile_s: float
    timed_s: float
    logs: Path | None


@dataclass(frozen=True, slots=True)
class Job:
    """A process to come; repetitions count from 0."""

    client: Client
    variant: Variant
    repetition: int

    @property
    def name(self) -> str:
        """A name that no other process of a run has."""
        return f"{self.client.name}.{self.variant.name}.{self.repetition + 1}"


class Turn:
    """The turn of one process, which lasts as long as the parent says: `stop` ends the process."""

    def __init__(self, file: Path) -> None:
        self.environ = {VARIABLE: str(file)}
        self.stop = threading.Event()
        self.ended = threading.Event()
        """To be set when the process has ended."""
        self.late = ""
        """Why the process had to be stopped; empty if it was not late."""
        self._file = file

    @property
    def has_compiled(self) -> bool:
        """Whether nobody has to wait for the process before the first turn."""
        return self._said("ready") or self.ended.is_set()

    @property
    def is_over(self) -> bool:
        """Whether the next one may be timed."""
        return self._said("timed") or self.ended.is_set()

    def begin(self) -> None:
        """Let the process go on."""
        self._file.with_name(f"{self._file.name}.go").touch()

    def give_up(self, why: str) -> None:
        """Stop the process, which is late."""
        # The first reason: a process that is being stopped is late for all that follows.
        self.late = self.late or why
        self.stop.set()

    def _said(self, what: str) -> bool:
        return self._file.with_name(f"{self._file.name}.{what}").exists()


@dataclass(frozen=True, slots=True)
class JobRunner:
    """Runs clients; their files lie in `folder`, whose path should be short, as it is part of sockets' names."""

    folder: Path
    settings: Settings

    def turn(self, job: Job) -> Turn:
        """Return a turn for a job."""
        return Turn(self.folder / f"turn.{job.name}")

    def measure(
        self, job: Job, turn: Turn, environ: Mapping[str, str]
    ) -> tuple[ClientRecord, dict[str, Any]]:
        """Run a job; return its record, and what the process said of the machine."""
        began = time.monotonic()
        record = ClientRecord(job.client.name, job.variant.name, job.repetition)
        try:
            outcome, summary = self._run(job, turn, environ)
        except BenchmarkError as error:  # of the daemon
            return replace(record, raised=str(error)), {}
        finally:
            # Whatever has happened: the other turns wait for this event.
            turn.ended.set()
        if self.settings.logs:
            self.settings.logs.mkdir(parents=True, exist_ok=True)
            (self.settings.logs / f"{job.name}.log").write_text(outcome.output)
        printed = result_of(outcome.output)
        found: dict[str, Any] = {name: printed[name] for name in _FIGURES if name in printed}
        found |= {name: summary.get(name) for name in _FROM_SUMMARY}
        seconds = round(time.monotonic() - began, 1)
        raised = f"killed: {turn.late}" if turn.late else raised_by(outcome)
        # Without a summary PyGraph took no part, and the figures would be those of plain torch.compile.
        if job.variant.is_ours and not summary and not raised:
            raised = NO_SUMMARY
        return replace(record, raised=raised, seconds=seconds, **found), printed

    def _run(self, job: Job, turn: Turn, environ: Mapping[str, str]) -> tuple[Outcome, dict[str, Any]]:
        caches, own = self.folder / f"caches.{job.client.name}", {**_OWN, **environ, **turn.environ}
        if not job.variant.is_ours:
            return self._run_program(job, turn, {**plain_environment(os.environ, caches), **own}), {}
        home, summary = self.folder / f"home.{job.name}", self.folder / f"summary.{job.name}.json"
        product = product_environment(os.environ, caches, home, summary)
        with Daemon(home):
            outcome = self._run_program(job, turn, {**product, **own})
        # Each rank of a process group writes a summary of its own.
        return outcome, read_summary(
            summary if job.client.gpus == 1 else summary.with_name(f"{summary.name}.0")
        )

    def _run_program(self, job: Job, turn: Turn, environ: Mapping[str, str]) -> Outcome:
        # torchrun's processes have sessions of their own, and torchrun ends them.
        grace_s = _GRACE_S if job.client.gpus > 1 else 0.0
        return run_fresh(self._arguments(job), environ, _LONGEST_S, stop=turn.stop, grace_s=grace_s)

    def _arguments(self, job: Job) -> list[str]:
        mode = "none" if job.variant.compile is Compile.EAGER else str(job.variant.compile.mode)
        # With --standalone, torchrun meets its processes at a free port, so that several of these run side by
        # side.
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.client.gpus)]
            if job.client.gpus > 1
            else []
        )
        tiny = ["--tiny"] if self.settings.tiny else []
        steps = ["--steps", str(self.settings.steps)]
        return [*launcher, str(job.client.program), "--mode", mode, *steps, *tiny]


_OWN = {"PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4"}
"""Variables of each process: a crash says where it was, nothing is downloaded."""


def result_of(output: str) -> dict[str, Any]:
    """Return what a client has printed as its result; empty without one."""
    for line in reversed(output.splitlines()):
        if line.startswith(RESULT):
            with contextlib.suppress(ValueError):
                result: dict[str, Any] = json.loads(line.removeprefix(RESULT))
                return result
    return {}


def raised_by(outcome: Outcome) -> str:
    """Return the line that says why a process failed; empty if it did well."""
    if outcome.error is None:
        return "" if result_of(outcome.output) else "it printed no result"
    if outcome.error.startswith("killed: "):
        return outcome.error
    # The line of a crash counts first: Python prints no exception for it, and one further up did not end the
    # process.
    lines = [_RANK.sub("", line).strip() for line in outcome.output.splitlines()]
    fatal = [line for line in lines if line.startswith(_FATAL)]
    if fatal:
        return fatal[-1][:_MAX_LINE]
    if line := last_exception(lines):
        return line
    return "it failed after its result" if outcome.error.startswith(RESULT) else outcome.error


# --- turns -------------------------------------------------------------------------------------------


def take_turns(turns: Sequence[Turn], stop: threading.Event, compile_s: float, timed_s: float) -> None:
    """Let processes be timed one after the other, and return when all are to have ended; when `stop` is set, stop them.

    They get `compile_s` seconds for all to have compiled, and each `timed_s` for its turn.
    """
    # All have to have compiled first: compiling uses the cores, and would make the steps of the first turn
    # longer.
    _wait(turns, stop, compile_s, "has_compiled", "not compiled")
    for turn in turns:
        turn.begin()
        _wait([turn], stop, timed_s, "is_over", "not timed")
    # A process whose turn is over has but to exit.
    end = time.monotonic() + _EXIT_S
    while not stop.is_set() and time.monotonic() < end and not all(each.ended.is_set() for each in turns):
        time.sleep(_POLL_S)
    for turn in turns:
        if not turn.ended.is_set():
            turn.give_up(f"it has not ended {_EXIT_S:.0f} s after its result")


def _wait(turns: Sequence[Turn], stop: threading.Event, limit_s: float, what: str, late: str) -> None:
    end = time.monotonic() + limit_s
    while not stop.is_set() and (left := [each for each in turns if not getattr(each, what)]):
        if time.monotonic() > end:
            for turn in left:
                turn.give_up(f"{late} after {limit_s:.0f} s")
            end += limit_s  # for them to end
        time.sleep(_POLL_S)
