"""`PYGRAPHD_MAX_SIZE` with a real daemon: the file stays below it, and what was unused for longest makes room."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from pygraphd.schema.messages import LOOKUP_PATH, RECORD_PATH, encode
from tests.support.daemon_home import HANGS_S
from tests.support.record_requests import digest, lookup_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.messages import RecordRequest
    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon

LIMIT = 10**6
MINUTE_S = 60.0
MONTH_S = 30 * 86_400.0
PART = 500
"""Entries in a message."""
USED = 50
"""Of the first ones, which are looked up."""


def _hits(home: Home) -> dict[str, int]:
    """Return the hits of each entry by its graph."""
    with contextlib.closing(sqlite3.connect(home.locations.database)) as connection:
        return dict(connection.execute("SELECT graph, hits FROM decision"))


def _age(home: Home, moments: dict[str, float]) -> None:
    """Have graphs been decided a minute after each other, not all at once."""
    with contextlib.closing(sqlite3.connect(home.locations.database, HANGS_S)) as connection, connection:
        connection.executemany(
            "UPDATE decision SET created_at = ? WHERE graph = ?",
            [(moment, graph) for graph, moment in moments.items()],
        )


def _size(home: Home) -> int:
    """Return the bytes of the file, or those that it will have once its log is written into it."""
    with contextlib.closing(sqlite3.connect(home.locations.database)) as connection:
        pages, size = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size")
        )
    return max(pages * size, home.locations.database.stat().st_size)


def _evicted(home: Home) -> int:
    evicted = home.ask("GET", "/v1/stats")[1]["evicted"]
    assert isinstance(evicted, int)
    return evicted


@pytest.mark.slow
def test_a_small_database_stays_small_and_keeps_what_is_used(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.variables |= {"PYGRAPHD_MAX_SIZE": str(LIMIT), "PYGRAPHD_HOUSEKEEPING": "0.1"}
    home.start()
    names: list[str] = []
    began = time.time() - MONTH_S

    def record_more() -> None:
        more = [str(len(names) + index) for index in range(PART)]
        assert home.ask("POST", RECORD_PATH, encode(make_request(*more)))[0] == 200
        _age(home, {digest(name): began + MINUTE_S * int(name) for name in more})
        names.extend(more)

    def fill(evicted: int) -> None:
        """Record until some are evicted beside those that were already, and wait until there is room again."""
        while _size(home) <= LIMIT and _evicted(home) == evicted:
            record_more()
        home.wait_until(lambda: _evicted(home) > evicted and _size(home) <= LIMIT)

    record_more()
    used = names[:USED]
    assert len(home.ask("POST", LOOKUP_PATH, lookup_body(*used))[1]["entries"]) == USED
    home.wait_until(lambda: sum(_hits(home).values()) == USED)
    for _ in range(2):
        fill(_evicted(home))

    home.wait_until(lambda: len(_hits(home)) == len(names) - _evicted(home))
    left = set(_hits(home))
    assert left >= set(map(digest, used))
    unused = [name for name in names if name not in used]
    gone = [name for name in unused if digest(name) not in left]
    assert gone == unused[: len(gone)]  # the oldest ones
    assert len(home.ask("POST", LOOKUP_PATH, lookup_body(*used))[1]["entries"]) == USED
    assert "evicted" in home.locations.log.read_text()
    assert home.status()["problems"] == []
