"""Read the summary that a program left (`PYGRAPH_SUMMARY=FILE`): its graphs, their decisions and environments."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.errors import UsageError
from pygraphd.schema.checks import InvalidMessageError, check_int
from pygraphd.schema.keys import DIGITS, Environment
from pygraphd.schema.messages import MAX_COUNT, read
from pygraphd.schema.summary import SUMMARY_VERSION, Deployed

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 64 * 2**20
"""Bound of a file's size: several times the largest summary that a client writes."""
NOTES = ("left_to_torch", "left_on_cpu", "graph_breaks", "fallbacks", "failures")
"""The parts of a summary that count reasons, beside the decisions; older summaries lack some."""
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of a summary. `environments` has each environment of a decision; `left_out` is the number of decisions not listed.

    `notes` has the number of times of each reason, for each of `NOTES`.
    """

    environments: dict[str, Environment]
    decisions: tuple[Deployed, ...]
    left_out: int
    notes: dict[str, dict[str, int]]


def is_file(target: str) -> bool:
    """Return whether an argument names a file, and not a graph; raises UsageError if it can be neither.

    A pipe, a folder or a device is refused. A name of hexadecimal digits that is no file is taken for a graph.
    """
    try:
        mode = os.stat(target).st_mode  # noqa: PTH116 - to Path, "" is the current folder
    except (OSError, ValueError):
        return False  # not there, too long for a path, or in a folder that cannot be searched
    if stat.S_ISREG(mode):
        return True
    if DIGITS.fullmatch(target):
        return False
    raise UsageError(f"{target}: is {_kind(mode)}, not a file that a program wrote for PYGRAPH_SUMMARY")


def _kind(mode: int) -> str:
    return next((name for is_one, name in _KINDS if is_one(mode)), "a device")


def read_summary(path: Path) -> Summary:
    """Return the summary in a file; raises UsageError for any other file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidMessageError(f"more than {MAX_BYTES} bytes")
        return _summary(json.loads(data))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: is no summary that can be explained: {error}; a program run with PYGRAPH_SUMMARY=FILE writes one"
        ) from error


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
        )
    )


def _reasons(name: str, value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise InvalidMessageError(f"{name}: expected an object")
    reasons: Counter[str] = Counter()
    for reason, times in value.items():
        reasons[_printable(reason)] += check_int(name, times, maximum=MAX_COUNT)
    return dict(reasons)


def _printable(text: str) -> str:
    """Return a reason without characters that a terminal might interpret; it can hold file names and error texts."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _checked(summary: Summary) -> Summary:
    unknown = {decision.environment for decision in summary.decisions} - summary.environments.keys()
    if unknown:
        raise InvalidMessageError(f"the environment {min(unknown)} is missing")
    return summary
