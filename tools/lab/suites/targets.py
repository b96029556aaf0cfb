"""The targets of PyGraph over a suite: each line with its bound, whether it is met, and the models that miss it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.workloads import Mode
from tools.lab.suites.results import (
    BY_HAND,
    DEFAULT,
    KINDS,
    REDUCE_OVERHEAD,
    Results,
    deciding_s,
    geometric_mean,
    noises,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

OVER_DEFAULT = {Mode.INFERENCE: 1.75, Mode.TRAINING: 1.30}
OVER_REDUCE_OVERHEAD = {"waited for": 1.08, "back to back": 1.04}
NO_SLOWER = 0.98
"""The better of the two plain variants over ours must not be below this by more than the noise."""
OF_BY_HAND = 0.95
"""Least ratio of the time of a CUDA graph by hand to ours."""
MEMORY = 1.10
"""Largest ratio of our peak reserved memory to that of `reduce-overhead`."""
DECIDING = 0.02
"""Largest time to decide, as a share of the time to compile with empty caches."""
_PLAIN_OF = {"pygraph-default": DEFAULT, "pygraph-cold": REDUCE_OVERHEAD}
"""For each variant of PyGraph with an empty cache, the variant that compiles in the same mode without PyGraph."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line; `figure` None: nothing of it has been measured. `missing` are the models by which it is missed, the worst first."""

    what: str
    bound: str
    figure: str | None
    models: int
    is_met: bool
    missing: tuple[str, ...]
    variant: str = ""
    """Of PyGraph's."""


def lines(results: Results, mode: Mode) -> Iterator[Line]:
    """Yield the lines of each variant of PyGraph with an empty cache that has results."""
    for ours in (each for each in _PLAIN_OF if each in results.variants):
        yield from (replace(each, variant=ours) for each in _lines_of(results, mode, ours))


def _lines_of(results: Results, mode: Mode, ours: str) -> Iterator[Line]:
    if ours == "pygraph-default":
        yield _mean(results, DEFAULT, ours, "waited for", OVER_DEFAULT[mode])
    yield from (
        _mean(results, REDUCE_OVERHEAD, ours, kind, least) for kind, least in OVER_REDUCE_OVERHEAD.items()
    )
    yield from (_no_slower(results, ours, kind) for kind in KINDS)
    if mode is Mode.INFERENCE:
        yield _by_hand(results, ours)
    yield _passing(results, ours)
    yield _memory(results, ours)
    yield _deciding(results, ours)


def _mean(results: Results, other: str, ours: str, kind: str, least: float) -> Line:
    ratios = results.ratios(kind, [other], ours, results.passing(other, ours))
    mean = geometric_mean(ratios.values())
    return _line(
        f"`{other}` over `{ours}`, {kind}", f"at least {least:g}", mean, ratios, lambda each: each < least
    )


def _no_slower(results: Results, ours: str, kind: str) -> Line:
    both = results.ratios(
        kind, [DEFAULT, REDUCE_OVERHEAD], ours, results.passing(DEFAULT, REDUCE_OVERHEAD, ours)
    )
    # Where `reduce-overhead` fails, `default` alone is what a user could have instead.
    ratios = {**results.ratios(kind, [DEFAULT], ours, results.passing(DEFAULT, ours)), **both}
    noise = noises(results, kind)
    most = max(noise.values(), default=0.0)
    # Where a model ran as `default` only once, its noise is not known, and the largest is allowed for.
    above = {name: ratio + noise.get(name, most) for name, ratio in ratios.items()}
    missing = sorted((name for name in above if above[name] < NO_SLOWER), key=ratios.__getitem__)
    worst = min(ratios.values(), default=None)
    return Line(
        f"better of `{DEFAULT}` and `{REDUCE_OVERHEAD}` over `{ours}`, {kind}, each model",
        f"at least {NO_SLOWER:g}, less its noise",
        None if worst is None else f"worst {worst:.3f}",
        len(ratios),
        not missing,
        tuple(missing),
    )


def _by_hand(results: Results, ours: str) -> Line:
    ratios = results.ratios("waited for", [BY_HAND], ours, results.passing(BY_HAND, ours))
    mean = geometric_mean(ratios.values())
    what = f"CUDA graph by hand over `{ours}`, waited for"
    return _line(what, f"at least {OF_BY_HAND:g}", mean, ratios, lambda each: each < OF_BY_HAND)


def _passing(results: Results, ours: str) -> Line:
    plain, own = results.passing(DEFAULT), results.passing(ours)
    missing = tuple(name for name in plain if ours in results.models[name] and name not in own)
    measured = [name for name in results.runnable() if ours in results.models[name]]
    figure = f"{len(own)} and {len([name for name in plain if name in measured])}" if measured else None
    return Line(
        f"models that `{ours}` and `{DEFAULT}` pass", "as many", figure, len(measured), not missing, missing
    )


def _memory(results: Results, ours: str) -> Line:
    found = {}
    for name in results.passing(REDUCE_OVERHEAD, ours):
        own, other = (results.models[name][each].reserved_mb for each in (ours, REDUCE_OVERHEAD))
        if own and other:
            found[name] = own / other
    mean = geometric_mean(found.values())
    what = f"peak reserved memory of `{ours}` over `{REDUCE_OVERHEAD}`'s"
    return _line(what, f"at most {MEMORY:g}", mean, found, lambda each: each > MEMORY, most=True)


def _deciding(results: Results, ours: str) -> Line:
    spent, compiling = {}, {}
    for name in results.passing(ours):
        records = results.models[name]
        plain = records.get(_PLAIN_OF[ours])
        # A process that found its caches filled has no time to compile. The plain variant of the same mode
        # may have one.
        seconds = records[ours].compile_s or (plain.compile_s if plain else None)
        if seconds and (own := deciding_s(records[ours])) is not None:
            spent[name], compiling[name] = own, seconds
    shares = {name: spent[name] / compiling[name] for name in spent}
    share = sum(spent.values()) / sum(compiling.values()) if spent else None
    what = f"time to decide of `{ours}` over the time to compile"
    return _line(
        what, f"at most {DECIDING:.0%}", share, shares, lambda each: each > DECIDING, most=True, form=".2%"
    )


def _line(
    what: str,
    bound: str,
    figure: float | None,
    of_models: Mapping[str, float],
    misses: Callable[[float], bool],
    *,
    most: bool = False,
    form: str = ".3f",
) -> Line:
    """Return a line on one figure, whose bound each model by itself may meet or not; `most`: the largest are the worst."""
    missing = sorted(
        (name for name in of_models if misses(of_models[name])), key=of_models.__getitem__, reverse=most
    )
    is_met = figure is not None and not misses(figure)
    return Line(
        what, bound, None if figure is None else f"{figure:{form}}", len(of_models), is_met, tuple(missing)
    )
