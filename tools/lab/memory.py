"""`python -m tools.lab memory WORKLOAD`: reserved GPU memory in steady state by pool, segment class and owner, for each way of running regions.

Unlike `run`, this looks inside, as `regions` does: one fresh process a way, all with the same compiled kernels.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import TORCH_FIELDS, describe_host
from benchmarks.errors import BenchmarkError, UnknownNameError
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.region_table import WAYS
from benchmarks.regions import Job, run_job
from benchmarks.table import NOTHING, aligned
from tools.lab.recording_memory import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchmarks.workloads import Workload

    Sizes = Callable[["Answer"], Sequence[int] | None]
    """Returns the figures of a cell from an answer; None where it has none."""

_OF_THE_JOB = ("workload", "repetition")
_MB = 1 << 20
_BETWEEN = " / "
_OF_POINT = ("reserved", "allocated", "most_allocated")
_OF_PART = ("reserved", "fragments", "empty")

Answer = dict[str, Any]
"""The answer of a process for one way, or its `error`."""


def measure_memory(workload: Workload, ways: Sequence[str], out: Path | None) -> list[Answer]:
    """Run the workload in each way, in a process of its own; all goes to `out` after each."""
    if unknown := [way for way in ways if way not in WAYS]:
        raise UnknownNameError("way", unknown, list(WAYS))
    if out is not None:
        check_writable(out)
    if reason := missing_device():
        raise BenchmarkError(f"{reason}: there is no GPU memory to look at")
    answers: list[Answer] = []
    environment = {**dict.fromkeys(TORCH_FIELDS), **describe_host()}
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as folder:
        for way in ways:
            found = run_job(Job(workload, way, 0, Path(folder)), ("tools.lab.memory_child",))
            answer = {name: value for name, value in found.items() if name not in _OF_THE_JOB}
            environment |= answer.pop("environment", {})
            answers.append(answer)
            if out is not None:
                # Not `records`: those who read files of `regions` would take it for one.
                content = {"environment": environment, "workload": workload.name, "ways": answers}
                write_json(out, {"schema": SCHEMA, **content})
    return answers


def missing_device() -> str | None:
    """Return why nothing can be measured here; None if there is a device. No context is made on it."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed here"
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device here"


# --- the table: a column for each way, in MB (2 ** 20 bytes) ------------------------------------------


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
    # Where tensors take most, since that is what the reserved memory has to hold.
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
            # One way may lack a pool, a class of segments or an owner that another has.
            if isinstance(found, dict) and key not in found:
                return None
            found = found[key]
        return [found[key] for key in keys] if all(key in found for key in keys) else None

    return find


def _names(found: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for each in found for name in each))


def _cell(sizes: Sequence[int] | None) -> str:
    return _BETWEEN.join(f"{size / _MB:.1f}" for size in sizes) if sizes else NOTHING
