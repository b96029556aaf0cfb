"""Reads the environment variables that users can set; README.md has their meaning. An invalid value is named, and the default stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pygraphd.client.backend import vouched_operators
from pygraphd.client.common import log
from pygraphd.client.decisions.trust import Trust
from pygraphd.client.dispatch.shapes import Bounds
from pygraphd.schema.durations import parse_duration
from pygraphd.schema.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DISABLE = "PYGRAPH_DISABLE"
TRUST = "PYGRAPH_TRUST"
READONLY = "PYGRAPH_READONLY"
REFRESH = "PYGRAPH_REFRESH"
RELOCATE = "PYGRAPH_RELOCATE"
PLACEMENT = "PYGRAPH_PLACEMENT"
COLLECTIVES = "PYGRAPH_COLLECTIVES"
GRAPH_OPS = "PYGRAPH_GRAPH_OPS"
RECHECK = "PYGRAPH_RECHECK_S"
RECHECK_S = 600.0
LOG = "PYGRAPH_LOG"
BUNDLE = "PYGRAPH_BUNDLE"
MAX_AGE = "PYGRAPH_MAX_AGE"
MAX_AGE_S = 30 * 86400.0
MEMORY = "PYGRAPH_MEMORY"
SIZES = "PYGRAPH_SIZES"
SIZE_CALLS = "PYGRAPH_SIZE_CALLS"
MAX_NUMBER = 10_000
"""The largest number of sizes or calls that is taken as meant."""

_OFF = frozenset({"", "0", "off", "false", "no"})
_ON = frozenset({"1", "on", "true", "yes"})
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one process; `misread` has a message for each invalid value."""

    readonly: bool = False
    refresh: bool = False
    relocate: bool = True
    placement: bool = True
    collectives: bool = True
    graph_ops: frozenset[str] = frozenset()
    recheck_s: float = RECHECK_S
    max_age_s: float = MAX_AGE_S
    """Age in seconds above which an entry is measured anew; 0: no limit."""
    memory_bytes: int = 0
    """GPU memory in bytes that a recording may have at a time while it is made; 0: all that is free."""
    sizes: Bounds = field(default_factory=Bounds)
    trust: Trust = Trust.VALIDATE
    bundle: Path | None = None
    """The folder of `PYGRAPH_BUNDLE`; None: there is none."""
    log: str | None = None
    """The level to log from; None: as the program has configured logging."""
    misread: tuple[str, ...] = ()


def read(environ: Mapping[str, str]) -> Options:
    """Return the options in an environment."""
    reader = _Reader(environ)
    relocate = reader.switch(RELOCATE, default=True)
    placement = reader.switch(PLACEMENT, default=True)
    collectives = reader.switch(COLLECTIVES, default=True)
    return Options(
        readonly=reader.switch(READONLY),
        refresh=reader.switch(REFRESH),
        relocate=relocate,
        placement=placement and relocate,  # for the sake of graphs, and of nothing else
        collectives=collectives and relocate,  # NCCL is set up for graphs of ours alone
        graph_ops=reader.operators(GRAPH_OPS),
        recheck_s=reader.parsed(RECHECK, parse_duration, RECHECK_S),
        max_age_s=reader.parsed(MAX_AGE, parse_duration, MAX_AGE_S),
        memory_bytes=reader.parsed(MEMORY, parse_size, 0),
        sizes=Bounds(
            sizes=reader.number(SIZES, Bounds().sizes, least=0),
            calls=reader.number(SIZE_CALLS, Bounds().calls, least=1),
        ),
        trust=reader.parsed(TRUST, _trust, Trust.VALIDATE, ", ".join(Trust)),
        # Absolute, since the program may change its folder before it ends.
        bundle=Path(environ[BUNDLE]).absolute() if environ.get(BUNDLE) else None,
        log=reader.parsed(LOG, _level, None, ", ".join(log.LEVELS)),
        # Last, since the calls above add to the list.
        misread=tuple(reader.misread),
    )


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return whether PYGRAPH_DISABLE keeps PyGraph out of the process: any value does that means neither "off" nor nothing."""
    return environ.get(DISABLE, "").strip().lower() not in _OFF


class _Reader:
    """Reads the variables of an environment; `misread` gets a message for each invalid value."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.misread: list[str] = []

    def parsed(self, name: str, parse: Callable[[str], _T], default: _T, expected: str = "") -> _T:
        """Return a value that `parse` makes, or raises ValueError; `expected` says what to set, where the error's text does not."""
        value = self._environ.get(name, "").strip()
        try:
            return parse(value) if value else default
        except ValueError as error:
            given = self._environ[name]
            why = f"={given} is not understood: set it to {expected}" if expected else f": {error}"
            self.misread.append(f"{name}{why}")
            return default

    def switch(self, name: str, *, default: bool = False) -> bool:
        return self.parsed(name, _is_on, default, "1 or 0")

    def number(self, name: str, default: int, *, least: int) -> int:
        def parse(value: str) -> int:
            if not least <= (number := int(value)) <= MAX_NUMBER:
                raise ValueError
            return number

        return self.parsed(name, parse, default, f"a whole number from {least} to {MAX_NUMBER}")

    def operators(self, name: str) -> frozenset[str]:
        names = {each.strip() for each in self._environ.get(name, "").split(",")} - {""}
        bad = sorted(each for each in names if not vouched_operators.is_name(each))
        self.misread.extend(
            f"{name}: {each} is not understood: name a namespace or a namespace::operator" for each in bad
        )
        return frozenset(names.difference(bad))


def _is_on(value: str) -> bool:
    if (lower := value.lower()) not in _ON | _OFF:
        raise ValueError
    return lower in _ON


def _trust(value: str) -> Trust:
    return Trust(value.lower())


def _level(value: str) -> str | None:
    if (lower := value.lower()) not in {*log.LEVELS, *_OFF}:
        raise ValueError
    return lower if lower in log.LEVELS else None
