"""Checks of rows before they are shown. Anybody who can write to a database file can put anything into it."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import TYPE_CHECKING, Any

from pygraphd.daemon.rederiving import decision_of, measurement_of
from pygraphd.schema.checks import InvalidMessageError, check_digest, check_int, check_number, check_text
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import MAX_COUNT, MAX_MICROSECONDS, MAX_TIME, Deployment, Graph, Kind, Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Row = dict[str, Any]
_TIMES = ("created_at", "measured_at", "last_hit")
_MEASURED = ("median_us", "mad_us", "host_us", "span_us", "host_mad_us", "span_mad_us", "busy", "measured_at")


def entry(row: Row, medians: Row) -> Row:
    """Make a row the facts of an entry, with its sizes as a list, and return it; raises InvalidMessageError unless the daemon could have stored all of them."""
    return _refused(lambda: _entry(row, medians))


def entries(columns: Mapping[str, Sequence[Any]], medians: Mapping[str, Sequence[Any]]) -> Row | None:
    """Return the columns of many rows with what `entry` would have made of each row, a fraction of the time.

    None: it may refuse one of them, or turn a number into another type.
    """
    try:
        return _entries(columns, medians)
    except (InvalidMessageError, ValueError, TypeError, AttributeError, OverflowError):
        return None


def environment(row: Row) -> Row:
    """Return the row of an environment; raises InvalidMessageError."""
    return _checked(row, lambda: _environment(row))


def measurement(row: Row) -> Row:
    """Return the row of a measurement; raises InvalidMessageError."""
    return _checked(row, lambda: _measurement(row))


def _checked(row: Row, check: Callable[[], Row]) -> Row:
    for name, value in row.items():
        # JSON has neither, and a table without types may hold both.
        if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidMessageError(f"{name}: neither text nor a finite number")
    return _refused(check)


def _refused(check: Callable[[], Row]) -> Row:
    """Return what a check returns; raises InvalidMessageError for whatever it raises of a value that it does not expect."""
    try:
        return check()
    except InvalidMessageError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidMessageError(str(error)) from error


def _entry(row: Row, medians: Row) -> Row:
    for name in ("id", "graph"):
        check_digest(name, row[name])
    sizes = _sizes(*_OF_GRAPH(row))
    _check_decision(*_OF_DECISION(row))
    _check_place(*_OF_PLACE(row))
    check_int("hits", row["hits"], maximum=MAX_COUNT)
    for name in _TIMES:
        if row[name] is not None or name == "created_at":
            row[name] = check_number(name, row[name], maximum=MAX_TIME)
    for name, median in medians.items():
        check_number(name, median, maximum=MAX_MICROSECONDS)
    row["final"], row["sizes"] = bool(row["final"]), list(sizes)
    return row


def _entries(columns: Mapping[str, Sequence[Any]], medians: Mapping[str, Sequence[Any]]) -> Row | None:
    # Before values are compared, among which 1 equals 1.0.
    if not _are_as_stored(columns, medians):
        return None
    for name in ("id", "graph"):
        for each in columns[name]:
            check_digest(name, each)
    of_graph = list(zip(*_OF_GRAPH(columns), strict=True))
    sizes = {each: _sizes(*each) for each in set(of_graph)}
    for each in set(zip(*_OF_DECISION(columns), strict=True)):
        _check_decision(*each)
    for each in set(zip(*_OF_PLACE(columns), strict=True)):
        _check_place(*each)
    for bound in (min, max):
        check_int("hits", bound(columns["hits"]), maximum=MAX_COUNT)
    for name in _TIMES:
        _check_bounds(name, columns[name], MAX_TIME)
    for name, values in medians.items():
        _check_bounds(name, values, MAX_MICROSECONDS)
    final = list(map(bool, columns["final"]))
    return {**columns, "final": final, "sizes": [list(sizes[each]) for each in of_graph]}


def _are_as_stored(columns: Mapping[str, Sequence[Any]], medians: Mapping[str, Sequence[Any]]) -> bool:
    return all(set(map(type, values)) <= _TYPES[name] for name, values in columns.items()) and all(
        set(map(type, values)) <= _NUMBER_OR_NONE for values in medians.values()
    )


def _check_bounds(name: str, values: Iterable[float | None], maximum: float) -> None:
    known = [value for value in values if value is not None]
    # The two stand for all: SQLite has no NaN, which compares with nothing.
    for bound in (min, max) if known else ():
        check_number(name, bound(known), maximum=maximum)


# Few values of these columns differ among many entries, and to check them takes longer than to read them. The caches tell 1 from 1.0.
_DECISION = ("deployment", "reason", "detail", "against", "against_detail", "policy", "final", "calls")
_OF_GRAPH = operator.itemgetter("kind", "partition", "partitions", "operators", "sizes")
_OF_DECISION = operator.itemgetter(*_DECISION)
_OF_PLACE = operator.itemgetter("environment", "gpu", "uid", "host")
_ANY_DIGEST = "0" * 64
_NUMBER_OR_NONE: frozenset[type] = frozenset({float, type(None)})
_TYPES: Mapping[str, frozenset[type]] = {
    **dict.fromkeys(("id", "graph", "kind", "sizes", "environment", "gpu", "host"), frozenset({str})),
    **dict.fromkeys(("deployment", "reason", "detail", "against", "against_detail"), frozenset({str})),
    **dict.fromkeys(("partition", "partitions", "operators", "policy", "final"), frozenset({int})),
    **dict.fromkeys(("calls", "uid", "hits"), frozenset({int})),
    **dict.fromkeys(_TIMES, _NUMBER_OR_NONE),
    "created_at": frozenset({float}),
}
"""The types in which the daemon stores the columns of an entry."""


@functools.lru_cache(maxsize=1024, typed=True)
def _sizes(kind: str, partition: int, partitions: int, operators: int, sizes: str) -> tuple[int, ...]:
    numbers = tuple(int(size) for size in sizes.split(",") if size)
    Graph(_ANY_DIGEST, Kind(kind), partition, partitions, operators, numbers)
    return numbers


@functools.lru_cache(maxsize=1024, typed=True)
def _check_decision(*columns: Any) -> None:
    row = dict(zip(_DECISION, columns, strict=True))
    check_int("final", row["final"], maximum=1)
    decision_of(row)


@functools.lru_cache(maxsize=1024, typed=True)
def _check_place(environment: str, gpu: str, uid: int, host: str) -> None:
    check_digest("environment", environment)
    check_text("gpu", gpu, maximum=256)
    check_int("uid", uid, maximum=2**32)
    check_text("host", host, maximum=256)


def _environment(row: Row) -> Row:
    check_digest("id", row["id"])
    Environment(**{field.name: row[field.name] for field in dataclasses.fields(Environment)})
    return row


def _measurement(row: Row) -> Row:
    measurement_of({**row, "deployment": Deployment(row["deployment"])})
    Origin(row["host"], row["version"])
    check_int("uid", row["uid"], maximum=2**32)
    check_number("measured_at", row["measured_at"], maximum=MAX_TIME)
    # Where tables have no types an integer may be stored, and text is made of floats.
    return _floats(row, _MEASURED)


def _floats(row: Row, names: tuple[str, ...]) -> Row:
    return {**row, **{name: float(row[name]) for name in names if row[name] is not None}}
