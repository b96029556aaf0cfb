"""Checks of rows before they are shown. Anybody who can write to a database file can put anything into it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from pygraphd.daemon.rederiving import decision_of, measurement_of
from pygraphd.schema.checks import InvalidMessageError, check_digest, check_int, check_number, check_text
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import MAX_COUNT, MAX_MICROSECONDS, MAX_TIME, Deployment, Graph, Kind, Origin

if TYPE_CHECKING:
    from collections.abc import Callable

Row = dict[str, Any]
_TIMES = ("created_at", "measured_at", "last_hit")
_MEASURED = ("median_us", "mad_us", "host_us", "span_us", "host_mad_us", "span_mad_us", "busy", "measured_at")


def entry(row: Row, medians: Row) -> Row:
    """Return the facts of an entry, its sizes as a list; raises InvalidMessageError unless the daemon could have stored all of them."""
    return _checked(row, lambda: _entry(row, medians))


def environment(row: Row) -> Row:
    """Return the row of an environment; raises InvalidMessageError."""
    return _checked(row, lambda: _environment(row))


def measurement(row: Row) -> Row:
    """Return the row of a measurement; raises InvalidMessageError."""
    return _checked(row, lambda: _measurement(row))


def _checked(row: Row, check: Callable[[], Row]) -> Row:
    for name, value in row.items():
        if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidMessageError(f"{name}: neither text nor a finite number")
    try:
        return check()
    except InvalidMessageError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidMessageError(str(error)) from error


def _entry(row: Row, medians: Row) -> Row:
    for name in ("id", "environment"):
        check_digest(name, row[name])
    sizes = [int(size) for size in row["sizes"].split(",") if size]
    Graph(
        row["graph"],
        Kind(row["kind"]),
        row["partition"],
        row["partitions"],
        row["operators"],
        tuple(sizes),
    )
    decision_of(row)
    check_text("gpu", row["gpu"], maximum=256)
    check_int("uid", row["uid"], maximum=2**32)
    check_text("host", row["host"], maximum=256)
    check_int("hits", row["hits"], maximum=MAX_COUNT)
    check_number("created_at", row["created_at"], maximum=MAX_TIME)
    for name in ("measured_at", "last_hit"):
        if row[name] is not None:
            check_number(name, row[name], maximum=MAX_TIME)
    for name, median in medians.items():
        check_number(name, median, maximum=MAX_MICROSECONDS)
    return {**_floats(row, _TIMES), "final": bool(row["final"]), "sizes": sizes}


def _environment(row: Row) -> Row:
    check_digest("id", row["id"])
    Environment(**{field.name: row[field.name] for field in dataclasses.fields(Environment)})
    return row


def _measurement(row: Row) -> Row:
    measurement_of({**row, "deployment": Deployment(row["deployment"])})
    Origin(row["host"], row["version"])
    check_int("uid", row["uid"], maximum=2**32)
    check_number("measured_at", row["measured_at"], maximum=MAX_TIME)
    return _floats(row, _MEASURED)


def _floats(row: Row, names: tuple[str, ...]) -> Row:
    return {**row, **{name: float(row[name]) for name in names if row[name] is not None}}
