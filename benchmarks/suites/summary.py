"""What a suite shows, by the definitions of PyTorch's dashboard and some of ours; docs/benchmarks.md has them.

A variant passes a model if it ran and its results were not wrong. Geometric means are over the models that all compared variants
pass, whose number is stated, so that no variant is spared the models in which it fails.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.records import Record, records_of
from benchmarks.suites.tables import STAND_INS
from benchmarks.table import NOTHING, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

EAGER, DEFAULT, TREES, AGAIN, BY_HAND = "eager", "default", "reduce-overhead", "default-again", "cuda-graph"
OURS = ("pygraph-default", "pygraph-default-warm", "pygraph-cold", "pygraph-warm")
NOT_COMPARED = "not compared"
"""How the remark on a model begins whose results were not held against eager's."""
NO_SLOWER = 0.98
"""The better of the two plain variants over ours must not be below this by more than the noise."""
_HEAD = (
    "variant",
    "pass",
    "models",
    "x eager",
    "x eager btb",
    "compression",
    "compile s",
    "coverage",
    "host ms",
    "decide s",
)
_TEXT = {0}
_KINDS: Mapping[str, Callable[[Record], float | None]] = {
    "waited for": lambda record: record.step_ms.median if record.step_ms else None,
    "back to back": lambda record: record.pipelined_ms.median if record.pipelined_ms else None,
}


@dataclass(frozen=True, slots=True)
class Results:
    """The records of a suite: by model, then by variant."""

    models: Mapping[str, Mapping[str, Record]]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Results:
        """Return records in order."""
        models: dict[str, dict[str, Record]] = {}
        for record in records:
            models.setdefault(record.workload, {})[record.variant] = record
        return cls(models)

    @property
    def variants(self) -> list[str]:
        """The variants of any model, in the order of the first."""
        return list(dict.fromkeys(name for records in self.models.values() for name in records))

    def runnable(self) -> list[str]:
        """Return the models that run in eager mode, or in any if eager was not asked for."""
        if not any(EAGER in records for records in self.models.values()):
            return list(self.models)
        return [name for name in self.models if self.passes(name, EAGER)]

    def passes(self, model: str, *variants: str) -> bool:
        """Whether all of these variants ran and were not wrong."""
        records = self.models[model]
        return all(passed(records.get(variant)) for variant in variants)

    def passing(self, *variants: str) -> list[str]:
        """Return the models that all of these variants pass."""
        return [name for name in self.models if self.passes(name, *variants)]

    def ratios(self, kind: str, above: Sequence[str], below: str, models: Iterable[str]) -> dict[str, float]:
        """Return by model the shortest time of the variants `above` over that of `below`: above 1, `below` is faster."""
        found = {}
        for name in models:
            times = [_KINDS[kind](self.models[name][each]) for each in (*above, below)]
            if all(times):
                *others, own = [time for time in times if time]
                found[name] = min(others) / own
        return found


def passed(record: Record | None) -> bool:
    """Whether a model ran and its results were not wrong; what could not be compared counts as right, as in the dashboard."""
    return record is not None and record.step_ms is not None and record.correct is not False


def render(content: Mapping[str, Any]) -> str:
    """Return the summary of a result file's content."""
    results = Results.of(records_of(content))
    compared = [each for each in results.variants if each not in (AGAIN, BY_HAND)]
    common = results.passing(*compared)
    lines = [
        f"{content['settings']['suite']} {content['settings']['mode']}: {len(results.runnable())} models run in eager mode,"
        f" {len(common)} pass in all of {', '.join(compared)}",
        *aligned(
            [_HEAD, *(_row(results, each, compared, common) for each in results.variants if each != AGAIN)],
            _TEXT,
        ),
        *(line for ours in OURS if ours in compared for line in _against(results, ours)),
        *_by_hand(results),
        *_noise(results),
        *_left_out(results, content["settings"].get("left_out") or {}),
    ]
    return "\n".join(lines)


# --- one variant by itself -------------------------------------------------------------------------


def _row(results: Results, variant: str, compared: Sequence[str], common: Sequence[str]) -> tuple[str, ...]:
    runnable = results.runnable()
    passing = [name for name in runnable if results.passes(name, variant)]
    measured = [name for name in runnable if variant in results.models[name]]
    models = common if variant in compared else [name for name in common if results.passes(name, variant)]
    records = [results.models[name][variant] for name in models]
    speed_ups = [
        geometric_mean(results.ratios(kind, [EAGER], variant, models).values()) if EAGER in compared else None
        for kind in _KINDS
    ]
    return (
        variant,
        f"{len(passing)}/{len(measured)}",
        str(len(models)),
        *(_number(each, 3) for each in speed_ups),
        _number(_mean(_compressions(results, variant, models)), 3),
        _number(_mean(record.compile_s for record in records), 1),
        _number(_mean(record.coverage for record in records), 3),
        _number(geometric_mean(record.host_ms.median for record in records if record.host_ms), 3),
        _number(_mean(_deciding_s(record) for record in records), 3),
    )


def _compressions(results: Results, variant: str, models: Iterable[str]) -> Iterable[float | None]:
    """Yield peak memory in eager mode over the variant's."""
    for name in models:
        eager, own = results.models[name].get(EAGER), results.models[name][variant]
        if eager and eager.allocated_mb and own.allocated_mb:
            yield eager.allocated_mb / own.allocated_mb


def _deciding_s(record: Record) -> float | None:
    parts = [each for each in (record.lookup_s, record.checking_s, record.measuring_s) if each is not None]
    return sum(parts) if parts else None


# --- against each other ----------------------------------------------------------------------------


def _against(results: Results, ours: str) -> Iterable[str]:
    """Yield how one of ours does against plain variants, each over the models that both pass."""
    noise = _noises(results)
    for others in ((DEFAULT,), (TREES,), (DEFAULT, TREES)):
        models = results.passing(*others, ours)
        for kind in _KINDS:
            ratios = results.ratios(kind, others, ours, models)
            if not ratios:
                continue
            worst = min(ratios, key=ratios.__getitem__)
            beyond = max(noise.values(), default=0.0)
            slow = [name for name, ratio in ratios.items() if ratio < NO_SLOWER - noise.get(name, beyond)]
            yield (
                f"{_better_of(others)} over {ours}, {kind}: {_number(geometric_mean(ratios.values()), 3)} over {len(ratios)} models;"
                f" worst {ratios[worst]:.3f} {worst}; below {NO_SLOWER} beyond noise: {', '.join(slow) or 'none'}"
            )
    memory = [
        own.reserved_mb / other.reserved_mb
        for name in results.passing(TREES, ours)
        for own, other in [(results.models[name][ours], results.models[name][TREES])]
        if own.reserved_mb and other.reserved_mb
    ]
    if memory:
        yield f"peak reserved memory of {ours} over {TREES}'s: {_number(geometric_mean(memory), 3)} over {len(memory)} models"


def _better_of(variants: Sequence[str]) -> str:
    return variants[0] if len(variants) == 1 else f"better of {' and '.join(variants)}"


def _by_hand(results: Results) -> Iterable[str]:
    for ours in OURS:
        ratios = results.ratios("waited for", [BY_HAND], ours, results.passing(BY_HAND, ours))
        if ratios:
            mean = _number(geometric_mean(ratios.values()), 3)
            yield f"graph by hand over {ours}, waited for: {mean} over {len(ratios)} models"


def _noise(results: Results) -> Iterable[str]:
    noise = _noises(results)
    if noise:
        worst = max(noise, key=noise.__getitem__)
        yield (
            f"noise ({DEFAULT} twice, {len(noise)} models): median {statistics.median(noise.values()):.1%},"
            f" largest {noise[worst]:.1%} {worst}"
        )


def _noises(results: Results) -> dict[str, float]:
    ratios = results.ratios("waited for", [DEFAULT], AGAIN, results.passing(DEFAULT, AGAIN))
    return {name: abs(ratio - 1) for name, ratio in ratios.items()}


# --- what is not in a mean -------------------------------------------------------------------------


def _left_out(results: Results, left_out: Mapping[str, str]) -> Iterable[str]:
    """Yield a line for each model that cannot be built, and for each variant that fails, is wrong or was not compared."""
    yield from (f"left out: {name}: {reason}" for name, reason in left_out.items())
    for name, records in results.models.items():
        for variant, record in records.items():
            if passed(record):
                remark = next(
                    (each for each in record.note.split("; ") if each.startswith(NOT_COMPARED)), None
                )
                yield from [f"{remark}: {name} {variant}"] if remark else []
                continue
            if variant == EAGER:
                stand_in = STAND_INS.get(name.partition("-")[0])
                hint = f" (`run` has {stand_in[0]} instead: {stand_in[1]})" if stand_in else ""
                yield f"does not run in eager mode: {name}: {record.note}{hint}"
            else:
                yield f"{'fails' if record.step_ms is None else 'WRONG'}: {name} {variant}: {record.note}"


# --- the quick set ---------------------------------------------------------------------------------


def against_stored(now: Iterable[Record], stored: Iterable[Record]) -> str:
    """Return how much better each of ours does against plain variants than in stored results."""
    new, old = Results.of(now), Results.of(stored)
    rows = [("model", "variant", "now", "stored", "now/stored")]
    changes: dict[str, list[float]] = {}
    for ours in (each for each in OURS if each in new.variants):
        models = [name for name in new.passing(DEFAULT, ours) if name in old.passing(DEFAULT, ours)]
        present, before = (each.ratios("waited for", [DEFAULT], ours, models) for each in (new, old))
        for name in present.keys() & before.keys():
            change = present[name] / before[name]
            changes.setdefault(ours, []).append(change)
            rows.append((name, ours, f"{present[name]:.3f}", f"{before[name]:.3f}", f"{change:.3f}"))
    rows[1:] = sorted(rows[1:])
    sums = [
        f"{DEFAULT} over {ours}, now over stored: {_number(geometric_mean(values), 3)} over {len(values)} models"
        for ours, values in changes.items()
    ]
    return (
        "\n".join([*aligned(rows, {0, 1}), *sums]) if sums else "no model in common with the stored results"
    )


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [each for each in values if each is not None]
    return statistics.fmean(found) if found else None


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
