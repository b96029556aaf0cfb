"""Reads the environment variables that users can set. An invalid value is named, and the default stands.

`PYGRAPH_DISABLE=1`: PyGraph is not installed, whatever else asks for it.
`PYGRAPH_READONLY=1`: the cache is read and never added to, and no daemon is started.
`PYGRAPH_REFRESH=1`: the cache is ignored; all graphs are measured anew, and the results replace its entries.
`PYGRAPH_RELOCATE=0`: all graphs are left to PyTorch, which runs them as without PyGraph.
`PYGRAPH_COLLECTIVES=0`: graphs with collectives are left to PyTorch; by default all ranks record them in the same call.
`PYGRAPH_PLACEMENT=0`: CPU values in a graph stay on the CPU, and are computed between the captured partitions.
`PYGRAPH_TRUST=all|validate|local`: decisions of other users and hosts are believed; validated on a few calls (default); not used.
`PYGRAPH_GRAPH_OPS=namespace,namespace::operator`: custom operators that may be captured, as they do nothing on the host.
`PYGRAPH_SIZES`: how many dynamic sizes of a graph are decided at a time; 64 by default, 0: none.
`PYGRAPH_SIZE_CALLS`: the call from which on a dynamic size is decided; 3 by default.
`PYGRAPH_RECHECK_S`: seconds between two checks of a graph's results, or a length of time; 600 by default, 0: none.
`PYGRAPH_MAX_AGE`: seconds, or `30d`, `12h`; entries measured longer ago are measured anew; 30 days by default, 0: no limit.
`PYGRAPH_MEMORY`: bytes, or `512MB`, `4GiB`; the GPU memory that recording may take beside the program's; 0 by default: all that is free.
`PYGRAPH_BUNDLE=FOLDER`: decisions are also looked up in the files of a folder, and written there when the program ends.
`PYGRAPH_LOG=debug|info|warning`: changes of state are logged from this level on; by default nothing is printed.
"""

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
    misread: list[str] = []
    relocate = _switch(RELOCATE, environ, misread, default=True)
    placement = _switch(PLACEMENT, environ, misread, default=True)
    collectives = _switch(COLLECTIVES, environ, misread, default=True)
    return Options(
        readonly=_switch(READONLY, environ, misread),
        refresh=_switch(REFRESH, environ, misread),
        relocate=relocate,
        placement=placement and relocate,  # for the sake of graphs, and of nothing else
        collectives=collectives and relocate,  # NCCL is set up for graphs of ours alone
        graph_ops=_operators(environ, misread),
        recheck_s=_parsed(RECHECK, environ, misread, parse_duration, RECHECK_S),
        max_age_s=_parsed(MAX_AGE, environ, misread, parse_duration, MAX_AGE_S),
        memory_bytes=_parsed(MEMORY, environ, misread, parse_size, 0),
        sizes=Bounds(
            sizes=_number(SIZES, environ, misread, default=Bounds().sizes, least=0),
            calls=_number(SIZE_CALLS, environ, misread, default=Bounds().calls, least=1),
        ),
        trust=_trust(environ, misread),
        # Absolute, since the program may change its folder before it ends.
        bundle=Path(environ[BUNDLE]).absolute() if environ.get(BUNDLE) else None,
        log=_level(environ, misread),
        # Last, since the calls above add to the list.
        misread=tuple(misread),
    )


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return whether PYGRAPH_DISABLE keeps PyGraph out of the process: any value does that means neither "off" nor nothing."""
    return environ.get(DISABLE, "").strip().lower() not in _OFF


def _trust(environ: Mapping[str, str], misread: list[str]) -> Trust:
    value = environ.get(TRUST, "").strip().lower() or Trust.VALIDATE
    if value not in list(Trust):
        misread.append(f"{TRUST}={environ[TRUST]} is not understood: set it to {', '.join(Trust)}")
        return Trust.VALIDATE
    return Trust(value)


def _level(environ: Mapping[str, str], misread: list[str]) -> str | None:
    value = environ.get(LOG, "").strip().lower()
    if value in log.LEVELS:
        return value
    if value not in _OFF:
        misread.append(f"{LOG}={environ[LOG]} is not understood: set it to {', '.join(log.LEVELS)}")
    return None


def _operators(environ: Mapping[str, str], misread: list[str]) -> frozenset[str]:
    names = {each.strip() for each in environ.get(GRAPH_OPS, "").split(",")} - {""}
    bad = sorted(each for each in names if not vouched_operators.is_name(each))
    misread.extend(
        f"{GRAPH_OPS}: {each} is not understood: name a namespace or a namespace::operator" for each in bad
    )
    return frozenset(names.difference(bad))


def _switch(name: str, environ: Mapping[str, str], misread: list[str], *, default: bool = False) -> bool:
    value = environ.get(name, "").strip().lower()
    if value not in _ON | _OFF:
        misread.append(f"{name}={environ[name]} is not understood: set it to 1 or 0")
    if default:
        # A value that is empty or not understood keeps the default.
        return value not in _OFF - {""}
    return value in _ON


def _number(name: str, environ: Mapping[str, str], misread: list[str], *, default: int, least: int) -> int:
    value = environ.get(name, "").strip()
    try:
        number = int(value or default)
    except ValueError:
        number = -1
    if not least <= number <= MAX_NUMBER:
        misread.append(
            f"{name}={environ[name]} is not understood: set it to a whole number from {least} to {MAX_NUMBER}"
        )
        return default
    return number


def _parsed(
    name: str, environ: Mapping[str, str], misread: list[str], parse: Callable[[str], _T], default: _T
) -> _T:
    value = environ.get(name, "").strip()
    try:
        return parse(value) if value else default
    except ValueError as error:
        misread.append(f"{name}: {error}")
        return default
