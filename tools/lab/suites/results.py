"""The figures of a suite, by the definitions of PyTorch's dashboard and some of ours; docs/benchmarks.md has them.

A variant passes a model if it ran and its results were not wrong. Geometric means are over the models that all compared variants
pass, whose number is stated, so that no variant is spared the models in which it fails.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.records import Record
from benchmarks.suites.tables import STAND_INS
from benchmarks.table import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

EAGER, DEFAULT, REDUCE_OVERHEAD, AGAIN, BY_HAND = (
    "eager",
    "default",
    "reduce-overhead",
    "default-again",
    "cuda-graph",
)
OURS = ("pygraph-default", "pygraph-default-warm", "pygraph-cold", "pygraph-warm")
_OTHER_BATCH = re.compile(r"-b\d+$")
"""Ends the name of a workload of the published table whose batch is not the suite's."""
NOT_COMPARED = "not compared"
"""How the remark on a model begins whose results were not held against eager's."""
HEAD = (
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
KINDS: Mapping[str, Callable[[Record], float | None]] = {
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

    @classmethod
    def of_suite(cls, records: Iterable[Record]) -> Results:
        """Return the records with the suite's batches, or all if there are no others: no model is to count twice in a mean."""
        found = list(records)
        return cls.of([each for each in found if not _OTHER_BATCH.search(each.workload)] or found)

    @property
    def variants(self) -> list[str]:
        """The variants of any model, in the order of the first."""
        return list(dict.fromkeys(name for records in self.models.values() for name in records))

    @property
    def compared(self) -> list[str]:
        """The variants that a model has to pass to count in a mean over several of them."""
        # A model that fails as the second `default`, or cannot be recorded by hand, would otherwise count in
        # no mean.
        return [each for each in self.variants if each not in (AGAIN, BY_HAND)]

    @property
    def common(self) -> list[str]:
        """The models that all compared variants pass."""
        return self.passing(*self.compared)

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
            times = [KINDS[kind](self.models[name][each]) for each in (*above, below)]
            if all(times):
                *others, own = [time for time in times if time]
                found[name] = min(others) / own
        return found


def passed(record: Record | None) -> bool:
    """Whether a model ran and its results were not wrong; what could not be compared counts as right, as in the dashboard."""
    return record is not None and record.step_ms is not None and record.correct is not False


# --- one variant by itself -------------------------------------------------------------------------


def rows(results: Results) -> list[tuple[str, ...]]:
    """Return the cells of each variant under `HEAD`."""
    return [_row(results, each) for each in results.variants if each != AGAIN]


def _row(results: Results, variant: str) -> tuple[str, ...]:
    compared, common = results.compared, results.common
    runnable = results.runnable()
    passing = [name for name in runnable if results.passes(name, variant)]
    # A model that a piece has not come to yet is no failure.
    measured = [name for name in runnable if variant in results.models[name]]
    models = common if variant in compared else [name for name in common if results.passes(name, variant)]
    records = [results.models[name][variant] for name in models]
    speed_ups = [
        geometric_mean(results.ratios(kind, [EAGER], variant, models).values()) if EAGER in compared else None
        for kind in KINDS
    ]
    return (
        variant,
        f"{len(passing)}/{len(measured)}",
        str(len(models)),
        *(number(each, 3) for each in speed_ups),
        number(_mean(_compressions(results, variant, models)), 3),
        number(_mean(record.compile_s for record in records), 1),
        number(_mean(record.coverage for record in records), 3),
        number(geometric_mean(record.host_ms.median for record in records if record.host_ms), 3),
        number(_mean(deciding_s(record) for record in records), 3),
    )


def _compressions(results: Results, variant: str, models: Iterable[str]) -> Iterable[float | None]:
    """Yield peak memory in eager mode over the variant's."""
    for name in models:
        eager, own = results.models[name].get(EAGER), results.models[name][variant]
        if eager and eager.allocated_mb and own.allocated_mb:
            yield eager.allocated_mb / own.allocated_mb


def deciding_s(record: Record) -> float | None:
    """Return the seconds of looking up, checking and measuring; None if the variant decides nothing."""
    parts = [each for each in (record.lookup_s, record.checking_s, record.measuring_s) if each is not None]
    return sum(parts) if parts else None


# --- noise, and what is not in a mean ---------------------------------------------------------------


def noises(results: Results, kind: str = "waited for") -> dict[str, float]:
    """Return by model how far two processes of `default` lie apart."""
    ratios = results.ratios(kind, [DEFAULT], AGAIN, results.passing(DEFAULT, AGAIN))
    return {name: abs(ratio - 1) for name, ratio in ratios.items()}


def noise_text(results: Results) -> str:
    """Return the median and the largest noise; empty if nothing is known of it."""
    noise = noises(results)
    if not noise:
        return ""
    worst = max(noise, key=noise.__getitem__)
    return (
        f"noise (`{DEFAULT}` twice, {len(noise)} models): median {statistics.median(noise.values()):.1%},"
        f" largest {noise[worst]:.1%} ({worst})"
    )


@dataclass(frozen=True, slots=True)
class Remark:
    """A model, or one variant of it, that is left out, fails, is wrong or was not compared, with the reason."""

    kind: str
    model: str
    variant: str
    reason: str


def remarks(results: Results, left_out: Mapping[str, str]) -> Iterator[Remark]:
    """Yield a remark for each model that cannot be built, and for each variant that fails, is wrong or was not compared."""
    yield from (Remark("left out", name, "", reason) for name, reason in left_out.items())
    for name, records in results.models.items():
        for variant, record in records.items():
            if passed(record):
                notes = [each for each in record.note.split("; ") if each.startswith(NOT_COMPARED)]
                yield from (
                    Remark(NOT_COMPARED, name, variant, each.partition(": ")[2]) for each in notes[:1]
                )
            elif variant == EAGER:
                stand_in = STAND_INS.get(name.partition("-")[0])
                hint = f" (`run` has {stand_in[0]} instead: {stand_in[1]})" if stand_in else ""
                yield Remark("does not run in eager mode", name, "", f"{record.note}{hint}")
            else:
                yield Remark("fails" if record.step_ms is None else "WRONG", name, variant, record.note)


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [each for each in values if each is not None]
    return statistics.fmean(found) if found else None


def number(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimals; `NOTHING` for None."""
    return NOTHING if value is None else f"{value:.{digits}f}"
