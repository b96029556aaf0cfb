"""The table of `memory`: a column for each way, in MB (2 ** 20 bytes)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.table import NOTHING, aligned
from tools.lab.recording_memory import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Answer = Mapping[str, Any]
    Sizes = Callable[[Answer], Sequence[int] | None]
    """Returns the figures of a cell from an answer; None where it has none."""

_MB = 1 << 20
_BETWEEN = " / "
_OF_POINT = ("reserved", "allocated", "most_allocated")
_OF_PART = ("reserved", "fragments", "empty")


def render(answers: Sequence[Answer]) -> str:
    """Return the table, with the ways that failed below it."""
    good = [each for each in answers if "error" not in each]
    failed = [f"{each['way']}: {each['error']}" for each in answers if "error" in each]
    if not good:
        return "\n".join(failed)
    rows = [(label, *(_cell(sizes(each)) for each in good)) for label, sizes in _rows(good)]
    return "\n".join([*aligned([("MB", *(each["way"] for each in good)), *rows], {0}), *failed])


def _rows(good: Sequence[Answer]) -> Iterator[tuple[str, Sizes]]:
    yield f"most reserved in the first {len(good[0]['warm_up'])} steps", _at("after_warm_up", "most_reserved")
    yield "most reserved later", _at("over_steps", "most_reserved")
    yield "most allocated later", _at("over_steps", "most_allocated")
    yield "in use on the device", _at("device_used")
    names = [point["name"] for point in good[0]["points"]]
    for index, name in enumerate(names):
        label = f"{name}: reserved{_BETWEEN}allocated{_BETWEEN}most allocated since the point before"
        yield label, _each("points", index, "most", keys=_OF_POINT)
    fullest = max(names, key=lambda name: max(each["snapshots"][name]["all"]["allocated"] for each in good))
    yield from _of_snapshot(good, fullest)
    for kind in _names([recording["kind"] for recording in each["recordings"]] for each in good):
        yield f"{kind}: outputs{_BETWEEN}scratch", _recorded(kind)


def _of_snapshot(good: Sequence[Answer], point: str) -> Iterator[tuple[str, Sizes]]:
    """Yield the rows of one point."""
    for kind, what in (("by_pool", "pool"), ("by_class", "segments")):
        for name in _names(each["snapshots"][point][kind] for each in good):
            label = f"{point}, {what} {name}: reserved{_BETWEEN}free beside something{_BETWEEN}empty"
            yield label, _each("snapshots", point, kind, name, keys=_OF_PART)
    for name in _names(each["snapshots"][point]["by_owner"] for each in good):
        yield f"{point}, allocated: {name}", _at("snapshots", point, "by_owner", name)


def _recorded(kind: str) -> Sizes:
    """Return a getter of sums over the recordings of a kind."""

    def find(answer: Answer) -> list[int] | None:
        found = [_of_recording(each) for each in answer["recordings"] if each["kind"] == kind]
        return [sum(column) for column in zip(*found, strict=True)] or None

    return find


def _of_recording(recording: Mapping[str, Any]) -> list[int]:
    made = recording["allocations"]
    return [sum(each["bytes"] for each in made if each["role"] == role) for role in Role]


def _at(*path: str | int) -> Sizes:
    """Return a getter of one figure."""
    return _each(*path[:-1], keys=path[-1:])


def _each(*path: str | int, keys: Sequence[str | int]) -> Sizes:
    """Return a getter of several figures."""

    def find(answer: Answer) -> list[int] | None:
        found: Any = answer
        for key in path:
            if isinstance(found, dict) and key not in found:
                return None
            found = found[key]
        return [found[key] for key in keys] if all(key in found for key in keys) else None

    return find


def _names(found: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for each in found for name in each))


def _cell(sizes: Sequence[int] | None) -> str:
    return _BETWEEN.join(f"{size / _MB:.1f}" for size in sizes) if sizes else NOTHING
