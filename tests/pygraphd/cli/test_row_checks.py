"""What is checked by column is taken and refused as it is row by row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.cli import row_checks
from pygraphd.schema.checks import InvalidMessageError

ROW = {
    "id": "a" * 64,
    "graph": "b" * 64,
    "kind": "backward",
    "partition": 0,
    "partitions": 3,
    "operators": 12,
    "sizes": "8,17",
    "deployment": "GRAPH",
    "reason": "faster",
    "detail": "",
    "against": "slower",
    "against_detail": "",
    "policy": 1,
    "final": 1,
    "calls": 24,
    "uid": 1000,
    "host": "host-a",
    "created_at": 1000.0,
    "measured_at": 1000.0,
    "hits": 5,
    "last_hit": None,
    "environment": "c" * 64,
    "gpu": "NVIDIA H200",
}
"""As it is stored."""
MEDIANS = {"KERNELS": 123.4, "GRAPH": None}
ODD = (
    *(None, True, -1, 0, 1, 2, 1.0, -1.0, 2.5, 2**63 - 1, float("inf"), 1e300),
    *("", "x", "\x1b]0;\x07", "5", "8,", "A" * 64, "d" * 64, "d" * 63, "x" * 5000, b"\xff"),
)


def one_by_one(rows: list[dict[str, Any]], medians: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    try:
        return [
            row_checks.entry(dict(row), {name: value for name, value in each.items() if value is not None})
            for row, each in zip(rows, medians, strict=True)
        ]
    except InvalidMessageError:
        return None


def by_column(rows: list[dict[str, Any]], medians: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    columns = {name: [row[name] for row in rows] for name in ROW}
    found = row_checks.entries(columns, {name: [each[name] for each in medians] for name in MEDIANS})
    return None if found is None else [{name: found[name][at] for name in ROW} for at in range(len(rows))]


def typed(rows: list[dict[str, Any]] | None) -> Any:
    """Return rows that compare as equal only where the types do, too."""
    return rows and [{name: (type(value), value) for name, value in row.items()} for row in rows]


def test_sound_rows_are_taken_as_they_are_row_by_row() -> None:
    rows = [ROW, {**ROW, "id": "d" * 64, "sizes": "", "final": 0, "measured_at": None, "last_hit": 5.0}]
    found = by_column(rows, [MEDIANS] * 2)
    assert found is not None
    assert typed(found) == typed(one_by_one(rows, [MEDIANS] * 2))
    assert [each["sizes"] for each in found] == [[8, 17], []]


@pytest.mark.parametrize("name", [*ROW, *MEDIANS])
def test_no_odd_value_is_taken_that_is_refused_row_by_row(name: str) -> None:
    """In a row among sound ones, so that a cache that takes 1.0 for 1 would find it checked."""
    taken = 0
    for value in ODD:
        odd = {**ROW, name: value} if name in ROW else ROW
        medians = MEDIANS if name in ROW else {**MEDIANS, name: value}
        found = by_column([ROW, odd, ROW], [MEDIANS, medians, MEDIANS])
        if found is not None:
            assert typed(found) == typed(one_by_one([ROW, odd, ROW], [MEDIANS, medians, MEDIANS])), value
            taken += 1
    assert taken < len(ODD)


@given(st.lists(st.tuples(st.sampled_from(sorted(ROW)), st.sampled_from(ODD)), max_size=2))
def test_neither_are_rows_with_several(changes: list[tuple[str, Any]]) -> None:
    rows = [ROW, {**ROW, **dict(changes)}]
    found = by_column(rows, [MEDIANS] * 2)
    if found is not None:
        assert typed(found) == typed(one_by_one(rows, [MEDIANS] * 2))
