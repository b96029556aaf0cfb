"""`python -m tools.lab campaign STEP...`: measurements one after the other within a time limit, as on a machine that is lent for minutes.

What a step has measured is in its own file as soon as it is known, and what its processes print goes into one log when it ends: few
files, as few come back from such a machine. Nothing is measured here: steps are the other commands.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environment import commit
from benchmarks.errors import BenchmarkError
from benchmarks.processes import ROOT, Outcome
from benchmarks.table import NOTHING, aligned
from tools.lab.campaign_steps import SECONDS, Command, Step, steps_of
from tools.lab.processes import as_ended, run_logged

MAX_FILES = 8
"""Files that come back from a lent machine."""
MAX_LINES = 60
_MAX_LINE = 190
_LOG = "campaign.log"
_KEPT_CHARACTERS = 1 << 20
"""Characters of one process's output that the log keeps, from its end."""
GRACE_S = 20.0
"""For the processes of a step to end in good order when they are late."""
REPORT_S = 20.0
LEAST_S = 10.0
"""With less left a step is not begun."""
NOT_BEGUN = "not begun: the time was up"
INTERRUPTED = "interrupted"


def run_campaign(
    names: Sequence[str],
    out: Path,
    gpus: int,
    end_s: float,
    told_commit: str | None,
    compiled: Path | None = None,
    decisions: Path | None = None,
) -> bool:
    """Run the steps of these names and print a summary, also when interrupted; return whether all succeeded.

    `compiled` is where compiled code stays for the next campaign; None: it goes with this one. `decisions` is the export to which
    `run` steps add what was decided.
    """
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as scratch:
        steps = steps_of(names, out, Path(scratch), gpus, end_s, compiled, decisions)
        campaign = Campaign(steps, out, end_s, stated_commit(told_commit), decisions)
        try:
            campaign.execute()
        finally:
            # Of an interrupted campaign, too: what some of its steps have measured is in their files.
            if campaign.done:
                print(summary(campaign), flush=True)
    return not campaign.failed


@dataclass(frozen=True, slots=True)
class Done:
    """A step that has ended, or was not begun; `error` None: all of its processes did well."""

    step: Step
    error: str | None
    seconds: float
    lines: tuple[str, ...] = ()


@dataclass(slots=True)
class Campaign:
    """Steps, of which those that are `done` are known; `end_s` counts from now on."""

    steps: Sequence[Step]
    out: Path
    end_s: float
    commit: str
    decisions: Path | None = None
    """The export that steps add to, if they do."""
    done: list[Done] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def execute(self) -> None:
        """Run all steps for which there is time."""
        self._prepare()
        for number, step in enumerate(self.steps, start=1):
            began = time.monotonic()
            try:
                # The kind of the step alone: with all workloads, its name may be longer than a file's may be.
                error, lines = self._take(step, f"{number}-{step.name.partition(':')[0]}")
            # Noted before the interrupt goes on, so that the summary has a line for this step as well.
            except KeyboardInterrupt:
                self._note(Done(step, INTERRUPTED, time.monotonic() - began))
                raise
            self._note(Done(step, error, time.monotonic() - began, tuple(lines)))

    @property
    def failed(self) -> bool:
        """Whether any step failed, or was not begun."""
        return len(self.done) < len(self.steps) or any(each.error for each in self.done)

    def _prepare(self) -> None:
        results = [step.result for step in self.steps if step.result]
        results += [self.decisions] if self.decisions else []
        # The campaign's log, and those of one step's processes, which lie beside it until the step has ended.
        most = len(results) + 1
        most += max((len(step.commands) for step in self.steps), default=0)
        if most > MAX_FILES:
            raise BenchmarkError(
                f"these steps leave up to {most} files, and {MAX_FILES} come back from a lent machine: take fewer at once"
            )
        # Files of an earlier campaign would be reported as this one's.
        if there := [each.name for each in results if each.exists()]:
            raise BenchmarkError(f"{self.out} has {', '.join(there)} already: name another folder with --out")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / _LOG).write_text("")
        except OSError as error:
            raise BenchmarkError(f"cannot write to {self.out}: {error.strerror}") from error

    def _note(self, done: Done) -> None:
        self.done.append(done)
        print(f"{done.step.name}: {done.error or 'done'} ({done.seconds:.0f} s)", file=sys.stderr, flush=True)

    def _take(self, step: Step, name: str) -> tuple[str | None, list[str]]:
        """Run a step; return its error, if any, and the lines for the summary."""
        left_s = self._began + self.end_s - time.monotonic()
        # Ending late processes and the report have to fit in as well: the machine goes back when the time is
        # up.
        left_s -= GRACE_S + (REPORT_S if step.report else 0.0)
        if left_s < LEAST_S:
            return NOT_BEGUN, []
        limit_s = min(step.limit_s, left_s)
        outcomes = self._beside(step.commands, limit_s, name)
        told = outcomes
        if step.report is not None:
            told = self._beside([step.report], REPORT_S, f"{name}-report")
            # The report's end counts as well: `compare` ends with 1 where a workload has become slower.
            outcomes = [*outcomes, *told]
        lines = [line for outcome in told for line in outcome.output.splitlines()]
        lines = [line for line in lines if re.search(step.telling, line)]
        return _error(step, outcomes, lines), lines

    def _beside(self, commands: Sequence[Command], limit_s: float, name: str) -> list[Outcome]:
        """Run commands side by side, and append their output to the log."""
        logs = [self.out / f"{name}.{number}.log" for number in range(len(commands))]
        stop = threading.Event()
        try:
            with ThreadPoolExecutor(len(commands)) as pool, contextlib.ExitStack() as stack:
                stack.callback(stop.set)  # the pool would wait for all of them
                running = [
                    pool.submit(
                        run_logged,
                        _arguments(command, limit_s),
                        self._environ(command),
                        limit_s,
                        log,
                        GRACE_S,
                        stop,
                    )
                    for command, log in zip(commands, logs, strict=True)
                ]
                for _ in as_ended(running):
                    pass
            return [each.result() for each in running]
        finally:
            self._keep(commands, logs)

    def _environ(self, command: Command) -> dict[str, str]:
        # The output of a process that is killed shall be in the log, too.
        own = {"BENCHMARK_COMMIT": self.commit, "PYTHONUNBUFFERED": "1", "COLUMNS": str(_MAX_LINE)}
        return {**os.environ, **own, **dict(command.environ)}

    def _keep(self, commands: Sequence[Command], logs: Sequence[Path]) -> None:
        with (self.out / _LOG).open("a") as stream:
            for command, log in zip(commands, logs, strict=True):
                text = log.read_text(errors="replace") if log.exists() else ""
                left_out = f"({len(text) - _KEPT_CHARACTERS} characters before this are left out)\n"
                shown = text if len(text) <= _KEPT_CHARACTERS else left_out + text[-_KEPT_CHARACTERS:]
                print(f"=== {' '.join(command.arguments)}\n{shown}", file=stream)
                # Its text is in the campaign's log now, and the number of files that come back is limited.
                log.unlink(missing_ok=True)


def _error(step: Step, outcomes: Sequence[Outcome], lines: Sequence[str]) -> str | None:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    return lines[-1] if errors and step.sums_up and lines else ", ".join(dict.fromkeys(errors)) or None


def _arguments(command: Command, limit_s: float) -> list[str]:
    return [str(int(limit_s)) if each == SECONDS else each for each in command.arguments]


def stated_commit(told: str | None) -> str:
    """Return the commit for the results; raises BenchmarkError if it is not known."""
    found = told or commit(ROOT)
    if found == "unknown":
        raise BenchmarkError(
            "there is no git here to say which commit this is: name it with --commit or $BENCHMARK_COMMIT"
        )
    return found


# --- the summary -----------------------------------------------------------------------------------


def summary(campaign: Campaign) -> str:
    """Return a line for each step, and then the last lines of each report, `MAX_LINES` in all."""
    rows = [("step", "s", "file", "came of it"), *map(_row, campaign.done)]
    telling = [each for each in campaign.done if each.lines]
    room = MAX_LINES - len(rows) - 2 * len(telling)  # a heading each, and how many lines are left out
    given = shares([len(each.lines) for each in telling], max(room, 0))
    told = [line for each, count in zip(telling, given, strict=True) for line in _last_lines(each, count)]
    return "\n".join(line[:_MAX_LINE] for line in [*aligned(rows, {0, 2, 3}), *told][:MAX_LINES])


def _row(done: Done) -> tuple[str, ...]:
    file = done.step.result
    there = file.name if file is not None and file.exists() else NOTHING
    return (done.step.name[:60], f"{done.seconds:.0f}", there, done.error or "done")


def _last_lines(done: Done, count: int) -> list[str]:
    """Return the last lines of a step: sums come last."""
    left_out = len(done.lines) - count
    more = [f"({left_out} lines before these are in {_LOG})"] if left_out else []
    return [f"-- {done.step.name}", *more, *done.lines[left_out:]]


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """Distribute `room` lines: one at a time to each report that has more."""
    # One line at a time, so that a report of a few lines is shown whole beside one of hundreds.
    given = [0] * len(wanted)
    while short := [index for index, most in enumerate(wanted) if given[index] < most]:
        if room <= 0:
            break
        for index in short[:room]:
            given[index] += 1
        room -= len(short)
    return given
