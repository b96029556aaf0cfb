"""The summary that `python -m benchmarks suite` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.records import records_of
from benchmarks.table import NOTHING, aligned
from benchmarks.workloads import Mode
from tools.lab.suites.results import HEAD, Results, noise_text, remarks, rows
from tools.lab.suites.targets import lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LINES_HEAD = ("line", "bound", "figure", "models", "met", "models that miss it")
_MAX_NAMES = 8
"""Models that a line names."""


def render(content: Mapping[str, Any]) -> str:
    """Return the summary of a result file's content."""
    results, settings = Results.of_suite(records_of(content)), content["settings"]
    found = [
        f"{settings['suite']} {settings['mode']}: {len(results.runnable())} models run in eager mode,"
        f" {len(results.common)} pass in all of {', '.join(results.compared)}",
        *aligned([HEAD, *rows(results)], {0}),
        "",
        *aligned([LINES_HEAD, *map(_plain, line_rows(results, Mode(settings["mode"])))], {0, 1, 4, 5}),
        "",
        _unquoted(noise_text(results)),
        *(
            f"{each.kind}: {' '.join(filter(None, (each.model, each.variant)))}: {each.reason}"
            for each in remarks(results, settings.get("left_out") or {})
        ),
    ]
    return "\n".join(found)


def _unquoted(text: str) -> str:
    # The text is shared with pages in Markdown, and a terminal shows its quotes as they are.
    return text.replace("`", "")


def _plain(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_unquoted, cells))


def line_rows(results: Results, mode: Mode) -> list[tuple[str, ...]]:
    """Return the cells of each line under `LINES_HEAD`."""
    return [
        (
            each.what,
            each.bound,
            NOTHING if each.figure is None else each.figure,
            str(each.models),
            NOTHING if each.figure is None else "yes" if each.is_met else "NO",
            _names(each.missing) if each.figure else "",
        )
        for each in lines(results, mode)
    ]


def _names(models: Sequence[str]) -> str:
    names = [name.removesuffix("-inference").removesuffix("-training") for name in models]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
