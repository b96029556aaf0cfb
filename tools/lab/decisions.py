"""Decisions of a run's daemons, as `pygraphd cache export` writes them: gathered in one file, and chosen for the package to ship.

`run --decisions FILE` gathers what all repetitions have decided. `ship` keeps what can be relied on.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.daemon import without_product
from benchmarks.errors import BenchmarkError
from benchmarks.processes import run_fresh
from pygraphd.daemon import exchange
from pygraphd.errors import UsageError
from pygraphd.schema import policy
from pygraphd.schema.messages import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.schema.portable import Portable

NOT_ON_A_GPU = "not of a GPU, or of a machine whose versions could not be read"
NOT_MEASURED = "rest on no measurement, so that nobody could validate them"
NOT_SURE = "not final by the present policy"
DISAGREE = "of graphs whose repetitions came to different deployments"
PUBLISHER = "pygraphd"
"""Stands for the host that measured."""
_DATABASE = "cache.db"
_TIMEOUT_S = 60.0
_NOT_IN_A_NAME = re.compile("[^a-z0-9]+")


def gather(folder: Path, file: Path) -> list[str]:
    """Add the final decisions of all daemons whose folders lie in `folder` to an export; return a line for each that could not be read.

    Each repetition's decision for a graph stays, so that `ship` can compare them.
    """
    homes = sorted(database.parent for database in folder.glob(f"*/{_DATABASE}"))
    with tempfile.TemporaryDirectory(prefix="pygraph-lab-") as scratch:
        exports = [Path(scratch) / f"{number}.jsonl" for number in range(len(homes))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            errors = list(pool.map(_export, homes, exports))
        done = [export for export, error in zip(exports, errors, strict=True) if error is None]
        # Read before it is written: several steps of a campaign add to the same file.
        entries = [*(read_export(file) if file.exists() else ()), *(e for d in done for e in read_export(d))]
    write_export(file, entries)
    return [f"{home.name}: {error}" for home, error in zip(homes, errors, strict=True) if error]


def _export(home: Path, file: Path) -> str | None:
    """Export a daemon's cache; return the error, if any."""
    environ = {**without_product(os.environ), "PYGRAPHD_HOME": str(home)}
    # -P and a neutral folder: the repository's `alembic` folder must not hide the library of that name.
    command = ["-P", "-m", "pygraphd", "cache", "export", str(file)]
    return run_fresh(command, environ, _TIMEOUT_S, folder=home).error


def read_export(file: Path) -> list[Portable]:
    """Return the entries of an export; raises BenchmarkError if it is not complete or not valid."""
    try:
        with file.open("rb") as stream:
            return [entry for entry in exchange.read_file(stream, str(file)) if entry is not None]
    except OSError as error:
        raise BenchmarkError(f"{file}: cannot be read: {error.strerror}") from error
    except UsageError as error:
        raise BenchmarkError(str(error)) from error


def write_export(file: Path, entries: Iterable[Portable]) -> None:
    """Write an export, replaced whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}")
    with new.open("w") as stream:
        exchange.write(entries, stream)
    new.replace(file)


def ship(exports: Sequence[Path], into: Path) -> list[str]:
    """Write one export for each GPU model, of what `chosen` keeps of some exports; return the lines to print.

    What the folder's file of a GPU model has already is taken in, too; newer measurements replace older ones.
    """
    chosen, left_out = choose([entry for file in exports for entry in read_export(file)])
    by_name: dict[str, list[Portable]] = {}
    for entry in chosen:
        by_name.setdefault(file_name(entry.environment.gpu), []).append(entry)
    lines = []
    for name, new in sorted(by_name.items()):
        file = into / name
        newest = {entry.key: entry for entry in read_export(file)} if file.exists() else {}
        newest |= {
            each.key: each for each in new if each.key not in newest or is_newer(each, newest[each.key])
        }
        # In the order of keys: the file is committed, and a new version of it is to differ only in what has
        # changed.
        write_export(file, (entry for _, entry in sorted(newest.items())))
        lines.append(f"{file}: {len(newest)} entries, {len(new)} of them from here")
    return [*lines, *(f"left out {count} {reason}" for reason, count in left_out.most_common())]


def choose(entries: Sequence[Portable]) -> tuple[list[Portable], Counter[str]]:
    """Return the newest entry of each key that a program elsewhere can rely on, and how many others were left out, by reason."""
    left_out: Counter[str] = Counter()
    by_key: dict[tuple[str, str], list[Portable]] = {}
    for entry in entries:
        reason, derived = _judged(entry)
        if reason is None:
            by_key.setdefault(entry.key, []).append(derived)
        else:
            left_out[reason] += 1
    chosen = []
    for same in by_key.values():
        # A decision that was not taken twice alike on one machine says little of another one.
        if len({each.record.decision.deployment for each in same}) > 1:
            left_out[DISAGREE] += len(same)
            continue
        chosen.append(max(same, key=lambda each: each.measured_at or 0.0))
    return chosen, left_out


def _judged(entry: Portable) -> tuple[str | None, Portable]:
    """Return why an entry is left out, if it is, and the entry as the present policy decides it, without its host's name."""
    factors = entry.environment.factors().values()
    if entry.environment.gpu == "none" or any(str(value).startswith("unknown") for value in factors):
        return NOT_ON_A_GPU, entry
    if entry.measured_at is None:
        return NOT_MEASURED, entry
    decision = policy.decide(entry.record.measurements)
    if not decision.final:
        return NOT_SURE, entry
    record = dataclasses.replace(
        entry.record, decision=dataclasses.replace(decision, calls=entry.record.decision.calls)
    )
    return None, dataclasses.replace(entry, record=record, origin=Origin(PUBLISHER, entry.origin.version))


def is_newer(entry: Portable, other: Portable) -> bool:
    """Whether an entry was measured after another."""
    return (entry.measured_at or 0.0) > (other.measured_at or 0.0)


def file_name(gpu: str) -> str:
    """Return the name of a GPU model's file: "NVIDIA H200" has nvidia-h200.jsonl."""
    return f"{_NOT_IN_A_NAME.sub('-', gpu.lower()).strip('-')}.jsonl"
