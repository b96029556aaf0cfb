"""From the trials of one workload and peer to its record in the result file, and that file itself (`schema` 1)."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.details import Details, details_of, read_details
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Figure, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.peers import Peer
    from benchmarks.task import Answer
    from benchmarks.trial import Trial
    from benchmarks.workloads import Workload

SCHEMA = 1
_T = TypeVar("_T")
NOTES = ("coverage is of one step, profiled after all timing; it counts kernels, no copies",)


@dataclass(frozen=True, slots=True)
class Record:
    """One workload run by one peer, over all repetitions; docs/benchmarks.md says what each figure means."""

    workload: str
    mode: str
    batch: int
    peer: str
    step_ms: Figure | None
    host_ms: Figure | None
    pipelined_ms: Figure | None
    repetition_medians_ms: list[float]
    reserved_mb: float | None
    compile_s: float | None
    measuring_s: float | None
    coverage: float | None
    correct: bool | None
    deployed: dict[str, int] | None
    note: str
    kernels: int | None = None
    graph_launches: int | None = None
    each_step_ms: list[list[float]] | None = None
    """The timed steps of each repetition in their order, if they were asked for."""
    details: Details = field(default_factory=Details)


def record_of(
    workload: Workload,
    peer: Peer,
    trials: Sequence[Trial],
    *,
    each_step: bool = False,
    together: bool = False,
) -> Record:
    """Return the record for the trials of one workload and peer, in the order in which they ran.

    `together`: others compiled beside them.
    """
    answers = [trial.answer for trial in trials if trial.answer]
    summaries = [trial.summary for trial in trials if trial.summary]
    coverage = next((answer.coverage for answer in reversed(answers) if answer.coverage), None)
    return Record(
        workload=workload.name,
        mode=str(workload.mode),
        batch=workload.batch,
        peer=peer.name,
        step_ms=summarize([ms for answer in answers for ms in answer.step_ms]),
        host_ms=summarize([ms for answer in answers for ms in answer.host_ms]),
        pipelined_ms=summarize([ms for answer in answers for ms in answer.pipelined_ms]),
        repetition_medians_ms=[round(statistics.median(a.step_ms), 6) for a in answers if a.step_ms],
        reserved_mb=max((a.reserved_mb for a in answers if a.reserved_mb is not None), default=None),
        compile_s=_median(_compile_s(trials, cold=True)),
        measuring_s=_median([summary["measuring_ms"] / 1e3 for summary in summaries]),
        coverage=round(coverage.share, 4) if coverage else None,
        correct=_all_correct(answers),
        deployed=summaries[-1]["deployed"] if summaries else None,
        note=_note(trials),
        kernels=coverage.kernels if coverage else None,
        graph_launches=coverage.graph_launches if coverage else None,
        each_step_ms=[[round(ms, 4) for ms in a.step_ms] for a in answers] if each_step else None,
        details=details_of(trials, together=together),
    )


def _compile_s(trials: Sequence[Trial], cold: bool) -> list[float]:
    return [trial.answer.compile_s for trial in trials if trial.answer and trial.compiled_cold is cold]


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def _all_correct(answers: Sequence[Answer]) -> bool | None:
    verdicts = [answer.correct for answer in answers if answer.correct is not None]
    return all(verdicts) if verdicts else None


def _note(trials: Sequence[Trial]) -> str:
    """Errors and remarks; what several repetitions have to say alike is said once."""
    said: dict[str, list[str]] = {}
    for trial in trials:
        for remark in _remarks(trial):
            said.setdefault(remark, []).append(str(trial.repetition + 1))
    remarks = [
        remark if len(where) == len(trials) else f"repetition {', '.join(where)}: {remark}"
        for remark, where in said.items()
    ]
    if (warm_s := _median(_compile_s(trials, cold=False))) is not None:
        remarks.append(f"first step with the compiler's caches filled: {warm_s:.1f} s")
    return "; ".join(remarks)


def _remarks(trial: Trial) -> list[str]:
    remarks = [trial.error or ""]
    if trial.answer:
        remarks += [trial.answer.note, trial.answer.coverage_note, _disturbed(trial.answer)]
    if trial.summary:
        remarks.append(", ".join(f"{name} {trial.summary.get(name)}" for name in _COUNTS))
        remarks.append(f"deployed {_counts(trial.summary['deployed'])}")
        remarks.append(_of_cpu_values(trial.summary))
        remarks.extend(f"{count} x {reason}" for reason, count in trial.summary.get("reasons", {}).items())
        refused = (each for each in trial.summary.get("fallbacks", {}) if each.startswith(_REFUSED))
        remarks.extend(f"launched: {reason}" for reason in refused)
    return [remark for remark in remarks if remark]


def _disturbed(answer: Answer) -> str:
    if not answer.disturbed:
        return ""
    return f"the host was slow in {answer.disturbed} of {answer.timings} timings"


_REFUSED = "verification"
"""What calls were launched for that ought not to have been."""
_COUNTS = ("graphs", "hits", "misses", "measured")


def _of_cpu_values(summary: dict[str, Any]) -> str:
    """Return what the rules for CPU values did, if anything; in a graph that Inductor's caches had they only send."""
    counts = {name: summary.get(name, 0) for name in ("placed", "placed_inputs", "sent")}
    counts["left_on_cpu"] = sum(summary.get("left_on_cpu", {}).values())
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _counts(deployed: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in deployed.items() if count) or "nothing"


def write_result(
    file: Path, environment: dict[str, str | None], settings: dict[str, Any], records: Sequence[Record]
) -> None:
    """Write a result file, whole or not at all."""
    write_json(
        file,
        {
            "schema": SCHEMA,
            "environment": environment,
            "settings": settings,
            "notes": list(NOTES),
            "records": [_without_details(record) for record in records],
            # Apart: readers of older versions refuse a record that has fields unknown to them.
            "details": [_details(record) for record in records],
        },
    )


def _without_details(record: Record) -> dict[str, Any]:
    values = dataclasses.asdict(record)
    del values["details"]
    return values


def _details(record: Record) -> dict[str, Any]:
    return {"workload": record.workload, "peer": record.peer, **dataclasses.asdict(record.details)}


def check_writable(file: Path) -> None:
    """Raise BenchmarkError if `file` could not be written; an existing one is left as it is."""
    if file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise BenchmarkError(f"cannot write {file}; name a file in an existing folder with --out")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write JSON to a file beside `file` and put it in its place, so that no reader sees half of it."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(handle, "w") as stream:
            json.dump(content, stream, indent=1)
            stream.write("\n")
        temporary = Path(name)
        temporary.chmod(0o644)
        temporary.replace(file)
    except OSError as error:
        raise BenchmarkError(
            f"cannot write {file}: {error.strerror}; name another file with --out"
        ) from error


def read_records(file: Path) -> list[Record]:
    """Return the records of a result file; raises BenchmarkError if it is none."""
    return _read(file, _read_all)


def _read_all(content: dict[str, Any]) -> list[Record]:
    details, settings = content.get("details", []), content["settings"]
    return [
        _read_record(values, read_details(detail_of(details, index, values), settings))
        for index, values in enumerate(content["records"])
    ]


def detail_of(
    details: Sequence[dict[str, Any]], index: int, record: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the item of `details` that belongs to the record of an index; None if there is none."""
    # In a file that was merged by hand there may be none, or that of another.
    found = details[index] if index < len(details) else None
    ours = found is not None and all(found[name] == record[name] for name in ("workload", "peer"))
    return found if ours else None


def read_title(file: Path) -> tuple[str, int]:
    """Return on what a result file was measured, in a line, and the number of steps before those that were timed.

    Raises BenchmarkError if it is no result file.
    """
    return _read(file, lambda content: (_title(content["environment"]), int(content["settings"]["warm_up"])))


def _title(environment: dict[str, str | None]) -> str:
    where = environment["gpu"] or environment["cpu"]
    return f"{where}, torch {environment['torch']}, commit {str(environment['commit'])[:12]}"


def _read(file: Path, get: Callable[[dict[str, Any]], _T]) -> _T:
    try:
        content = json.loads(file.read_text())
        if content["schema"] != SCHEMA:
            raise BenchmarkError(f"{file}: schema {content['schema']!r}, this program reads {SCHEMA}")
        return get(content)
    except OSError as error:
        raise BenchmarkError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BenchmarkError(f"{file} is no result of `python -m benchmarks run`: {error!r}") from error


def _read_record(values: dict[str, Any], details: Details) -> Record:
    figures = {name: values[name] and Figure(**values[name]) for name in _FIGURES}
    return Record(**{**values, **figures, "details": details})


_FIGURES = ("step_ms", "host_ms", "pipelined_ms")
