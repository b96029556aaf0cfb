"""The result file of `run`: a record for each workload and variant, made from its trials."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchmarkError
from benchmarks.figures import Figure, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.trial import TrialResult
    from benchmarks.variants import Variant
    from benchmarks.workloads import Workload

SCHEMA = 2
_FIGURES = ("step_ms", "host_ms", "pipelined_ms")
_COUNTED = ("captured", "fallbacks", "failures")


@dataclass(frozen=True, slots=True)
class Record:
    """One workload run as one variant, over all repetitions; docs/benchmarks.md defines the fields. None: not known."""

    workload: str
    mode: str
    batch: int
    variant: str
    step_ms: Figure | None = None
    host_ms: Figure | None = None
    pipelined_ms: Figure | None = None
    repetition_medians_ms: list[float] = field(default_factory=list)
    """The median waited-for step of each process."""
    repetition_pipelined_ms: list[float] = field(default_factory=list)
    """The median back-to-back step of each process."""
    reserved_mb: float | None = None
    allocated_mb: float | None = None
    compile_s: float | None = None
    compiled_together: bool = False
    """Whether other processes compiled beside these, which makes `compile_s` longer."""
    lookup_s: float | None = None
    checking_s: float | None = None
    measuring_s: float | None = None
    recording_s: float | None = None
    coverage: float | None = None
    kernels: int | None = None
    graph_launches: int | None = None
    correct: bool | None = None
    deployed: dict[str, int] | None = None
    counted: list[dict[str, Any]] | None = None
    """Counts of each process of PyGraph: recordings, copied inputs, fallbacks and failures by reason."""
    note: str = ""
    each_step_ms: list[list[float]] | None = None


def record_of(
    workload: Workload,
    variant: Variant,
    trials: Sequence[TrialResult],
    *,
    each_step: bool = False,
    together: bool = False,
) -> Record:
    """Return the record of one workload and variant; `trials` are in the order in which they ran."""
    answers = [trial.answer for trial in trials if trial.answer]
    summaries = [trial.summary for trial in trials if trial.summary]
    # One step is profiled in one of the repetitions only.
    coverage = next((answer.coverage for answer in reversed(answers) if answer.coverage), None)
    verdicts = [answer.correct for answer in answers if answer.correct is not None]
    return Record(
        workload=workload.name,
        mode=str(workload.mode),
        batch=workload.batch,
        variant=variant.name,
        step_ms=summarize([ms for answer in answers for ms in answer.step_ms]),
        host_ms=summarize([ms for answer in answers for ms in answer.host_ms]),
        pipelined_ms=summarize([ms for answer in answers for ms in answer.pipelined_ms]),
        repetition_medians_ms=_medians([answer.step_ms for answer in answers]),
        repetition_pipelined_ms=_medians([answer.pipelined_ms for answer in answers]),
        reserved_mb=max((a.reserved_mb for a in answers if a.reserved_mb is not None), default=None),
        allocated_mb=max((a.allocated_mb for a in answers if a.allocated_mb is not None), default=None),
        compile_s=_median(_compile_s(trials, cold=True)),
        compiled_together=together,
        lookup_s=_seconds(summaries, "lookup_ms"),
        checking_s=_seconds(summaries, "checking_ms"),
        measuring_s=_seconds(summaries, "measuring_ms"),
        recording_s=_seconds(summaries, "recording_ms"),
        coverage=round(coverage.share, 4) if coverage else None,
        kernels=coverage.kernels if coverage else None,
        graph_launches=coverage.graph_launches if coverage else None,
        correct=all(verdicts) if verdicts else None,
        deployed=summaries[-1]["deployed"] if summaries else None,
        counted=[{name: each.get(name) for name in _COUNTED} for each in summaries] or None,
        note=_note(trials),
        each_step_ms=[[round(ms, 4) for ms in a.step_ms] for a in answers] if each_step else None,
    )


def _medians(of_each: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.median(samples), 6) for samples in of_each if samples]


def _compile_s(trials: Sequence[TrialResult], cold: bool) -> list[float]:
    answers = [trial.answer for trial in trials if trial.answer and trial.compiled_cold is cold]
    return [answer.compile_s for answer in answers if answer.compile_s is not None]


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 6) if values else None


def _seconds(summaries: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return _median([summary[name] / 1e3 for summary in summaries if name in summary])


# --- notes ---------------------------------------------------------------------------------------


def _note(trials: Sequence[TrialResult]) -> str:
    """Return errors and remarks; a remark that all repetitions share is given once."""
    said: dict[str, list[str]] = {}
    for trial in trials:
        for remark in filter(None, _remarks(trial)):
            said.setdefault(remark, []).append(str(trial.repetition + 1))
    remarks = [
        remark if len(where) == len(trials) else f"repetition {', '.join(where)}: {remark}"
        for remark, where in said.items()
    ]
    if (warm_s := _median(_compile_s(trials, cold=False))) is not None:
        remarks.append(f"first step with the compiler's caches filled: {warm_s:.1f} s")
    return "; ".join(remarks)


def _remarks(trial: TrialResult) -> Iterator[str]:
    yield trial.error or ""
    if trial.answer:
        yield trial.answer.note
        yield trial.answer.coverage_note
    if trial.summary:
        summary = trial.summary
        yield ", ".join(f"{name} {summary.get(name)}" for name in ("graphs", "hits", "misses", "measured"))
        yield f"deployed {_counts(summary['deployed'])}"
        # A graph from Inductor's cache only sends them.
        placed = {name: summary.get(name, 0) for name in ("placed", "placed_inputs", "sent")}
        left = sum(summary.get("left_on_cpu", {}).values())
        yield f"CPU values: {_counts({**placed, 'left_on_cpu': left})}"
        yield from (f"{count} x {reason}" for reason, count in summary.get("reasons", {}).items())
        refused = (each for each in summary.get("fallbacks", {}) if each.startswith("verification"))
        yield from (f"ran as KERNELS: {reason}" for reason in refused)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"


# --- the file ------------------------------------------------------------------------------------


def write_result(
    file: Path, environment: Mapping[str, Any], settings: Mapping[str, Any], records: Sequence[Record]
) -> None:
    """Write a result file, whole or not at all."""
    content = {
        "schema": SCHEMA,
        "environment": environment,
        "settings": settings,
        "records": [dataclasses.asdict(record) for record in records],
    }
    write_json(file, content)


def check_writable(file: Path) -> None:
    """Raise BenchmarkError if `file` could not be written; an existing file is left as it is."""
    # The folder's rights count, since a file is replaced by a rename.
    if file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise BenchmarkError(f"cannot write {file}; name a file in an existing folder with --out")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON to a file beside `file` and move it there, so that no reader sees half of it."""
    try:
        # Beside the file: a rename works within one file system only.
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(handle, "w") as stream:
            json.dump(content, stream, indent=1)
            stream.write("\n")
        temporary = Path(name)
        # mkstemp makes files that nobody else can read.
        temporary.chmod(0o644)
        temporary.replace(file)
    except OSError as error:
        raise BenchmarkError(
            f"cannot write {file}: {error.strerror}; name another file with --out"
        ) from error


def read_records(file: Path) -> list[Record]:
    """Return the records of a result file; raises BenchmarkError if it is none."""
    content = read_result(file)
    try:
        return records_of(content)
    except (TypeError, KeyError) as error:
        raise BenchmarkError(f"{file} is no result of `python -m benchmarks run`: {error!r}") from error


def read_result(file: Path) -> dict[str, Any]:
    """Return the content of a result file of `run` or `regions`; raises BenchmarkError if it is none."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        if content["schema"] != SCHEMA:
            raise BenchmarkError(f"{file}: schema {content['schema']!r}, this program reads {SCHEMA}")
        # Looked at here, so that JSON of another kind is refused by name, and not by an error further on.
        _ = content["environment"].keys(), [each.keys() for each in content["records"]]
    except OSError as error:
        raise BenchmarkError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BenchmarkError(f"{file} is no result of `python -m benchmarks`: {error!r}") from error
    return content


def records_of(content: Mapping[str, Any]) -> list[Record]:
    """Return the records of a result's content; raises TypeError or KeyError if it is none of `run`."""
    return [_record(values) for values in content["records"]]


def _record(values: Mapping[str, Any]) -> Record:
    # A file of another version may have fields that this one does not know.
    known = {each.name: values[each.name] for each in dataclasses.fields(Record) if each.name in values}
    return Record(**known | {name: Figure(**known[name]) for name in _FIGURES if known.get(name)})
