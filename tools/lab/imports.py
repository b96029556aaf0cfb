"""`python -m tools.lab imports`: wall time of processes that only import something, with and without PyGraph."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import without_product
from benchmarks.environment import describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Figure, summarize
from benchmarks.processes import run_fresh
from benchmarks.records import SCHEMA, check_writable, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Variant:
    """A one-line program; `baseline` names the variant that it is compared with."""

    name: str
    code: str
    variables: tuple[tuple[str, str], ...] = ()
    baseline: str | None = None


_NOTHING = "python -c pass"
_TORCH = "import torch, no entry points"
# PyTorch's TORCH_DEVICE_BACKEND_AUTOLOAD=0 has `import torch` load no entry points, and so not PyGraph's.
VARIANTS = (
    Variant(_NOTHING, "pass"),
    Variant("import pygraphd", "import pygraphd", baseline=_NOTHING),
    Variant(_TORCH, "import torch", (("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"),)),
    Variant("import torch, PYGRAPH unset", "import torch", baseline=_TORCH),
    Variant("import torch, PYGRAPH=1", "import torch", (("PYGRAPH", "1"),), baseline=_TORCH),
)


def measure_imports(
    variants: Sequence[Variant], repetitions: int, out: Path, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Time every variant, in alternating order; returns lines for people, and writes all figures to `out`."""
    check_writable(out)
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        environments = {v.name: _environment(v, environ, Path(folder)) for v in variants}
        for variant in variants:
            _run_s(variant, environments[variant.name])  # fills the caches of files and bytecode
        times = _interleaved(variants, environments, repetitions)
    records = [_record(variant, times) for variant in variants]
    write_json(out, {"schema": SCHEMA, "environment": describe_host(), "records": records})
    return [_line(record) for record in records]


def _environment(variant: Variant, environ: Mapping[str, str], home: Path) -> dict[str, str]:
    plain = {name: value for name, value in without_product(environ).items() if name not in _LEFT_OUT}
    return {**plain, "PYGRAPHD_HOME": str(home), "PYGRAPHD_AUTOSTART": "0", **dict(variant.variables)}


# Where it is set for this process, it would decide for the other variants, too, whether entry points are
# loaded.
_LEFT_OUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD"}


def _interleaved(
    variants: Sequence[Variant], environments: Mapping[str, dict[str, str]], repetitions: int
) -> dict[str, list[float]]:
    """Return the milliseconds of each variant, one for each repetition; every other one runs backwards (A B B A)."""
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for repetition in range(repetitions):
        for variant in reversed(variants) if repetition % 2 else variants:
            times[variant.name].append(_run_s(variant, environments[variant.name]) * 1e3)
        print(f"repetition {repetition + 1} of {repetitions}", file=sys.stderr, flush=True)
    return times


def _run_s(variant: Variant, environ: Mapping[str, str]) -> float:
    started = time.perf_counter()
    outcome = run_fresh(["-P", "-c", variant.code], environ, _TIMEOUT_S)
    seconds = time.perf_counter() - started
    if outcome.error:
        raise BenchmarkError(f"{variant.name}: {outcome.error}")
    return seconds


def _record(variant: Variant, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    own = times[variant.name]
    differences = (
        # Within a repetition: the machine drifts from one to the next.
        [mine - other for mine, other in zip(own, times[variant.baseline], strict=True)]
        if variant.baseline
        else []
    )
    return {
        "name": variant.name,
        "baseline": variant.baseline,
        "wall_ms": _as_dict(summarize(own)),
        "difference_ms": _as_dict(summarize(differences)),
    }


def _as_dict(figure: Figure | None) -> dict[str, float] | None:
    return asdict(figure) if figure else None


def _line(record: Mapping[str, Any]) -> str:
    wall, difference = record["wall_ms"], record["difference_ms"]
    line = f"{record['name']:30} {wall['median']:9.1f} ± {wall['mad']:.1f} ms"
    if not difference:
        return line
    return f"{line}, {difference['median']:+.1f} ± {difference['mad']:.1f} ms beside: {record['baseline']}"
