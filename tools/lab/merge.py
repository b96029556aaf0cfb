"""`python -m tools.lab merge`: result files of `run`, or of `regions`, as one file."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchmarkError
from benchmarks.records import SCHEMA, check_writable, read_result, records_of, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


def merge(files: Sequence[Path], out: Path, note: str | None) -> int:
    """Merge files into `out` and return its number of records.

    Raises BenchmarkError, and writes nothing, if one is no result file, if some are of `run` and some of `regions`, or if they are of
    different commits and no `note` says why they belong together.
    """
    check_writable(out)
    contents = {str(file): read_result(file) for file in files}
    # Files of `regions` have no settings.
    if len({"settings" in each for each in contents.values()}) > 1:
        raise BenchmarkError("results of `run` cannot be merged with results of `regions`")
    commits = {name: each["environment"].get("commit") for name, each in contents.items()}
    if note is None and len(set(commits.values())) > 1:
        told = ", ".join(f"{name} {value}" for name, value in commits.items())
        raise BenchmarkError(f"files of different commits: {told}; say with --note why they belong together")
    merged = merged_content(list(contents.values()), note)
    write_json(out, merged)
    return len(merged["records"])


_AND = "; "


def merged_content(contents: Sequence[Mapping[str, Any]], note: str | None) -> dict[str, Any]:
    """Return one content: records in the files' order; of environments and settings that differ, all values."""
    said = _different(text for each in contents for text in each.get("notes", []))
    return {
        "schema": SCHEMA,
        "environment": _environment([each["environment"] for each in contents]),
        **(
            {"settings": _settings([each["settings"] for each in contents])}
            if "settings" in contents[0]
            else {}
        ),
        "notes": [*said, *([note] if note else [])],
        "records": [record for each in contents for record in _records(each)],
    }


def _records(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "settings" not in content:
        return list(content["records"])
    # By way of `Record`, so that a record of an older file has all fields.
    return [dataclasses.asdict(record) for record in records_of(content)]


def _environment(environments: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    names = dict.fromkeys(name for each in environments for name in each)
    known = {
        # A file that was merged before names several.
        name: _different(
            part
            for each in environments
            if each.get(name) is not None
            for part in str(each[name]).split(_AND)
        )
        for name in names
    }
    return {name: _AND.join(values) or None for name, values in known.items()}


def _settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in settings for name in each)
    values = {
        name: _different(
            part
            for each in settings
            for part in (each[name] if isinstance(each.get(name), list) else [each.get(name)])
        )
        for name in names
    }
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


def _different(values: Iterable[Any]) -> list[Any]:
    # A list and no set: settings may be lists and dictionaries, which cannot be in a set.
    found: list[Any] = []
    for each in values:
        if each not in found:
            found.append(each)
    return found
