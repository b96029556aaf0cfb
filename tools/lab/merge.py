"""`python -m tools.lab merge`: result files of `run`, or of `regions`, as one. Records and details stay side by side, and as they are."""

from __future__ import annotations

import dataclasses
import json
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.details import read_details
from benchmarks.errors import BenchmarkError
from benchmarks.records import check_writable, detail_of, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

RUN, REGIONS = "run", "regions"
_BETWEEN = "; "


@dataclass(frozen=True, slots=True)
class Source:
    """A file to be merged."""

    name: str
    kind: str
    content: dict[str, Any]


def merge(files: Sequence[Path], out: Path, note: str | None) -> int:
    """Merge files into `out`; returns how many records it has. `note` says why files of other commits or schemas are taken together.

    Raises BenchmarkError if they do not belong together, or one is no result file; then nothing is written.
    """
    check_writable(out)
    sources = [_read(file) for file in files]
    if reason := _why_not(sources):
        raise BenchmarkError(reason)
    if note is None and (reason := _differs(sources)):
        raise BenchmarkError(f"{reason}; say with --note why they belong together all the same")
    merged = merged_content(sources, note)
    write_json(out, merged)
    return len(merged["records"])


def _read(file: Path) -> Source:
    try:
        content = json.loads(file.read_text())
        kind = _kind(content)
    except OSError as error:
        raise BenchmarkError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BenchmarkError(f"{file} is no result of `run` or `regions`: {error!r}") from error
    return Source(file.name, kind, content)


def _kind(content: Mapping[str, Any]) -> str:
    """Return which command has written a file; raises KeyError and the like if it has not what such a file has."""
    _ = operator.index(content["schema"]), content["environment"]["commit"]
    if "settings" in content:
        _ = [(each["workload"], each["peer"]) for each in content["records"]]
        return RUN
    _ = [(each["workload"], each["way"]) for each in content["records"]]
    return REGIONS


def _why_not(sources: Sequence[Source]) -> str | None:
    of_runs = [each.name for each in sources if each.kind == RUN]
    if not of_runs or len(of_runs) == len(sources):
        return None
    return f"{', '.join(of_runs)} of `run` cannot be merged with others, of `regions`"


def _differs(sources: Sequence[Source]) -> str | None:
    """Return what keeps figures from being taken for those of one program."""
    for what, of_each in (
        ("schemas", [each.content["schema"] for each in sources]),
        ("commits", [each.content["environment"]["commit"] for each in sources]),
    ):
        if len(_different(of_each)) > 1:
            told = ", ".join(f"{source.name} {value}" for source, value in zip(sources, of_each, strict=True))
            return f"files of different {what}: {told}"
    return None


def merged_content(sources: Sequence[Source], note: str | None) -> dict[str, Any]:
    """Return what a file of all of them holds."""
    contents = [each.content for each in sources]
    first: dict[str, Any] = {
        "schema": max(each["schema"] for each in contents),
        "environment": _together(each["environment"] for each in contents),
    }
    records = {"records": [record for each in contents for record in each["records"]]}
    notes = {"notes": [*_notes(sources), *([note] if note else [])]}
    if sources[0].kind == REGIONS:
        return {**first, **notes, **records}
    settings = {"settings": _settings([each["settings"] for each in contents])}
    return {
        **first,
        **settings,
        **notes,
        **records,
        "details": [item for each in contents for item in _details(each)],
    }


def _together(environments: Iterable[Mapping[str, str | None]]) -> dict[str, str | None]:
    """Return an environment that names all that any of them names."""
    found: dict[str, list[Any]] = {}
    for each in environments:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    known = {
        name: _different(value for value in values if value is not None) for name, values in found.items()
    }
    return {name: _BETWEEN.join(map(str, values)) if values else None for name, values in known.items()}


def _settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what they have in common, and of what differs a list of each file's."""
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name) for each in settings] for name in names}
    return {name: each[0] if len(_different(each)) == 1 else each for name, each in values.items()}


def _notes(sources: Sequence[Source]) -> list[Any]:
    said = _different(note for each in sources for note in each.content.get("notes", []))
    files = ", ".join(f"{each.name} ({len(each.content['records'])} records)" for each in sources)
    return [*said, f"merged of {files}"]


def _details(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an item for each record, also where a file has none: its own settings say what there is to say."""
    details = content.get("details", [])
    for index, record in enumerate(content["records"]):
        found = detail_of(details, index, record)
        yield found or {
            **{name: record[name] for name in ("workload", "peer")},
            **dataclasses.asdict(read_details(None, content["settings"])),
        }


def _different(values: Iterable[Any]) -> list[Any]:
    """Return values without those that come again."""
    found: list[Any] = []
    for each in values:
        if each not in found:
            found.append(each)
    return found
