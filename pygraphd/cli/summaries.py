"""Read the summary that a program left (`PYGRAPH_SUMMARY=FILE`): its graphs, their decisions and environments."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pygraphd.cli.output import printable
from pygraphd.errors import UsageError
from pygraphd.schema.checks import InvalidMessageError, check_int, check_number, check_text
from pygraphd.schema.keys import DIGITS, Environment
from pygraphd.schema.messages import MAX_COUNT, MAX_TIME, Measurement, read
from pygraphd.schema.ownership import open_regular
from pygraphd.schema.summary import SUMMARY_VERSION, Deployed, Memory

HOW = "a program run by `pygraphd run`, or with PYGRAPH_SUMMARY=FILE, writes one when it ends"
"""How a summary is made."""
MAX_SUMMARY_BYTES = 64 * 2**20
"""Bound of a file's size: several times the largest summary that a client writes."""
NOTES = ("left_to_torch", "left_on_cpu", "graph_breaks", "between_graphs", "fallbacks", "failures")
"""The parts of a summary that count reasons, beside the decisions; older summaries lack some."""
SPENT_TIMES = ("lookup_ms", "measuring_ms", "checking_ms", "recording_ms")
"""The parts of a summary with the host time that PyGraph took."""
MAX_MS = 1e12
MAX_FACT_TEXT = 1000
"""Characters of a module path or of a source line that are kept."""
_BEGINNING_BYTES = 64
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a process noted of one graph; None or empty: it noted nothing.

    `whole` is the digest of the graph without sizes, for a graph at dynamic sizes. `module` is the path of the innermost module that has
    all of the graph, and `places` are source lines. `nodes` is the number of kernels, copies and fills of its recording. `launches` is the number
    of kernels that its generated code calls, and `launches_between`, for the first partition, of those between partitions. A replay allocates
    `memory_bytes`, beside what its executables take on the GPU: about 3 KB a node, but the driver does not say it, and a graph gets further
    executables while it runs. `seen_at` and `decided_at` are seconds since the epoch.
    """

    whole: str = ""
    partition: int = 0
    partitions: int = 1
    operators: int | None = None
    module: str = ""
    places: tuple[str, ...] = ()
    nodes: int | None = None
    launches: int | None = None
    launches_between: int = 0
    memory_bytes: int | None = None
    seen_at: float | None = None
    decided_at: float | None = None
    figures: tuple[Measurement, ...] = ()

    def __post_init__(self) -> None:
        check_int("partitions", self.partitions, maximum=MAX_COUNT, minimum=1)
        check_int("partition", self.partition, maximum=self.partitions - 1)
        check_int("launches_between", self.launches_between, maximum=MAX_COUNT)
        for name in ("operators", "nodes", "launches", "memory_bytes"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, maximum=MAX_COUNT)
        for name in ("seen_at", "decided_at"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, maximum=MAX_TIME)
        for text in (self.whole, self.module, *self.places):
            check_text("facts", text, maximum=MAX_FACT_TEXT)


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of a summary. `environments` has each environment of a decision; `left_out` is the number of decisions not listed.

    `notes` has the number of times of each reason, for each of `NOTES`; `facts` those of each graph by digest. `spent_ms` has the host time
    of each of `SPENT_TIMES`. `program` and `pid` name the process; empty and None in a summary of an older version, in which `memory` is 0 throughout.
    """

    environments: dict[str, Environment]
    decisions: tuple[Deployed, ...]
    left_out: int
    notes: dict[str, dict[str, int]]
    facts: dict[str, Facts] = field(default_factory=dict)
    spent_ms: dict[str, float] = field(default_factory=dict)
    program: str = ""
    pid: int | None = None
    memory: Memory = field(default_factory=Memory)


def is_file(target: str) -> bool:
    """Return whether an argument names a file, and not a graph; raises UsageError if it can be neither.

    A pipe, a folder or a device is refused. A name of hexadecimal digits that is no file is taken for a graph.
    """
    mode = _mode(target)
    if mode is not None and stat.S_ISREG(mode):
        return True
    if not DIGITS.fullmatch(target):
        check_absent(target)
    return False


def begins_as_one(target: str) -> bool:
    """Return whether a file begins as a summary does, and not as a script."""
    try:
        with os.fdopen(open_regular(Path(target), follow=True), "rb") as stream:
            return stream.read(_BEGINNING_BYTES).lstrip().startswith(b"{")
    except (OSError, ValueError):
        return False


def check_absent(target: str) -> None:
    """Raise UsageError if something lies at a path that is no file, and say what it is."""
    if (mode := _mode(target)) is not None:
        raise UsageError(f"{target}: is {_kind(mode)}, not a summary; {HOW}")


def _mode(target: str) -> int | None:
    try:
        return os.stat(target).st_mode  # noqa: PTH116 - to Path, "" is the current folder
    except (OSError, ValueError):
        return None  # not there, too long for a path, or in a folder that cannot be searched


def _kind(mode: int) -> str:
    return next((name for is_one, name in _KINDS if is_one(mode)), "a device")


def read_summary(path: Path) -> Summary:
    """Return the summary in a file; raises UsageError for any other file."""
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as stream:
            # One byte more than is allowed, by which a file that is too large differs from the largest.
            data = stream.read(MAX_SUMMARY_BYTES + 1)
        if len(data) > MAX_SUMMARY_BYTES:
            raise InvalidMessageError(f"more than {MAX_SUMMARY_BYTES} bytes")
        return _summary(_json(data))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not a summary: {error}; {HOW}") from error


def _json(data: bytes) -> Any:
    """Return the JSON value of a file. Where it has none, the parser's words help nobody who took another file for a summary."""
    if not data.strip():
        raise InvalidMessageError("it is empty")
    try:
        return json.loads(data)
    # JSON that is nested too deeply raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError("it is another file, or only a part of one") from error


def _summary(value: Any) -> Summary:
    if not isinstance(value, dict) or value.get("schema") != SUMMARY_VERSION:
        raise InvalidMessageError(f"expected an object with schema {SUMMARY_VERSION}")
    environments, decisions = value.get("environments"), value.get("decisions")
    if not isinstance(environments, dict) or not isinstance(decisions, list):
        raise InvalidMessageError("it lists no decisions (those of older versions do not)")
    return _checked(
        Summary(
            {key: read(Environment, factors) for key, factors in environments.items()},
            tuple(read(Deployed, decision) for decision in decisions),
            check_int("decisions_left_out", value.get("decisions_left_out", 0), maximum=MAX_COUNT),
            {name: _reasons(name, value.get(name, {})) for name in NOTES},
            _facts(value.get("facts", {})),
            {name: check_number(name, value.get(name, 0.0), maximum=MAX_MS) for name in SPENT_TIMES},
            *_program(value.get("program", {})),
            read(Memory, value.get("memory", {})),
        )
    )


def _facts(value: Any) -> dict[str, Facts]:
    if not isinstance(value, dict):
        raise InvalidMessageError("facts: expected an object")
    # Texts are cut before they are checked: a long path is no reason to refuse a whole summary.
    return {digest: read(Facts, _printable_texts(facts)) for digest, facts in value.items()}


def _printable_texts(facts: Any) -> Any:
    """Return facts with names of modules and files that a terminal can show, cut to `MAX_FACT_TEXT`; anything else as it is."""
    if not isinstance(facts, dict):
        return facts
    places = facts.get("places", [])
    shown = [_short(each) for each in places] if isinstance(places, list) else places
    return {**facts, "places": shown, "module": _short(facts.get("module", ""))}


def _short(text: Any) -> Any:
    return printable(text)[:MAX_FACT_TEXT] if isinstance(text, str) else text


def _program(value: Any) -> tuple[str, int | None]:
    if not isinstance(value, dict):
        raise InvalidMessageError("program: expected an object")
    pid = value.get("pid")
    return _short(str(value.get("name", ""))), None if pid is None else check_int("pid", pid, maximum=2**31)


def _reasons(name: str, value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise InvalidMessageError(f"{name}: expected an object")
    reasons: Counter[str] = Counter()
    for reason, times in value.items():
        # Reasons that differ in what cannot be printed are one here.
        reasons[printable(reason)] += check_int(name, times, maximum=MAX_COUNT)
    return dict(reasons)


def _checked(summary: Summary) -> Summary:
    # Those who read a summary look up the environment of each decision.
    unknown = {decision.environment for decision in summary.decisions} - summary.environments.keys()
    if unknown:
        raise InvalidMessageError(f"the environment {min(unknown)} is missing")
    return summary
