"""A result file as a short table for people; plain text, so that it survives pipes and narrow terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from benchmarks.figures import Figure
    from benchmarks.records import Record

_HEAD = (
    *("workload", "variant", "step ms", "host ms", "pipelined ms", "reserved MB", "compile s"),
    *("measuring s", "in graphs", "correct", "deployed"),
)
_TEXT_COLUMNS = {0, 1, len(_HEAD) - 2, len(_HEAD) - 1}
NOTHING = "-"


def render(records: Sequence[Record]) -> str:
    """Return the table, and below it the notes of records that failed or were wrong."""
    rows = [_HEAD, *(_row(record) for record in records)]
    bad = [each for each in records if each.note and (each.step_ms is None or each.correct is False)]
    notes = [f"{each.workload} {each.variant}: {each.note}" for each in bad]
    return "\n".join([*aligned(rows, _TEXT_COLUMNS), *notes])


def aligned(rows: Sequence[Sequence[str]], text_columns: Collection[int]) -> list[str]:
    """Return rows of cells as lines in which columns are aligned, those of text to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(record: Record) -> tuple[str, ...]:
    return (
        record.workload,
        record.variant,
        _spread(record.step_ms),
        _spread(record.host_ms),
        _spread(record.pipelined_ms),
        _number(record.reserved_mb, 0),
        _number(record.compile_s, 1),
        _number(record.measuring_s, 3),
        NOTHING if record.coverage is None else f"{record.coverage:.1%}",
        {True: "yes", False: "NO", None: NOTHING}[record.correct],
        " ".join(f"{name}:{count}" for name, count in (record.deployed or {}).items() if count) or NOTHING,
    )


def _spread(figure: Figure | None) -> str:
    return f"{figure.median:.3f} ± {figure.mad:.3f}" if figure else NOTHING


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
