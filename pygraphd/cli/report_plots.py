"""The two plots of `pygraphd report --html`, as SVG elements for an HTML page: no script, no file, no namespace to fetch.

Colours are CSS variables of the page, so that they follow its light or dark scheme. Each bar segment carries the number of its graph.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pygraphd.cli.report import Report, Row

COLOURS = 8
"""Graphs with a colour of their own; the rest of a step is one grey segment."""
_WIDTH, _LEFT, _RIGHT = 720, 110, 80
_BAR, _GAP = 34, 18
_HEIGHT, _TOP, _BOTTOM = 260, 24, 44
_MIN_LABEL = 18
"""The width of a segment, in units of the view box, from which it is labelled."""


def step_plot(report: Report) -> str:
    """Return a plot of where a step's time goes, with KERNELS alone and as it ran; empty if nothing was measured."""
    rows = report.compared
    longest = max(report.without_ms, report.with_ms)
    if not rows or longest <= 0:
        return ""
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    # By identity: a row holds a dictionary, and so has no hash.
    numbers = {id(row): number for number, row in enumerate(report.rows, start=1)}
    parts = []
    for line, (name, total, kernels_alone) in enumerate(
        (("KERNELS alone", report.without_ms, True), ("with PyGraph", report.with_ms, False))
    ):
        y = _GAP + line * (_BAR + _GAP)
        # SVG places a text by its baseline, which is about 4 units below the middle of the letters.
        parts.append(_text(_LEFT - 8, y + _BAR / 2 + 4, name, anchor="end"))
        parts.extend(_segments(rows, numbers, kernels_alone, scale, y))
        parts.append(_text(_LEFT + total * scale + 6, y + _BAR / 2 + 4, f"{total:.3g} ms"))
    height = 2 * (_BAR + _GAP) + _GAP
    return _svg(height, "Time of a step in compiled graphs, with KERNELS alone and as it ran", parts)


def _segments(
    rows: Iterable[Row], numbers: dict[int, int], kernels_alone: bool, scale: float, y: float
) -> Iterable[str]:
    x, others_ms, others = float(_LEFT), 0.0, 0
    for row in rows:
        ms = (row.kernels_ms if kernels_alone else row.step_ms) or 0.0
        number = numbers[id(row)]
        if number > COLOURS:
            others_ms, others = others_ms + ms, others + 1
            continue
        title = f"#{number} {row.ran.kind} {row.module}: {ms:.3f} ms"
        yield _segment(x, y, ms * scale, f"c{number}", title, f"#{number}")
        x += ms * scale
    if others:
        yield _segment(x, y, others_ms * scale, "c0", f"{others} more: {others_ms:.3f} ms", "more")


def _segment(x: float, y: float, width: float, name: str, title: str, label: str) -> str:
    # The gap keeps neighbours apart where colours are not told apart, as in print.
    drawn = max(width - 1.5, 0.5)
    # Browsers show an SVG's title under the pointer, without a script.
    rectangle = f'<rect x="{x:.1f}" y="{y:.1f}" width="{drawn:.1f}" height="{_BAR}" class="{name}"><title>{escape(title)}</title></rect>'
    fits = drawn >= _MIN_LABEL + 6 * (len(label) - 2)
    return rectangle + (
        _text(x + drawn / 2, y + _BAR / 2 + 4, label, anchor="middle", name="on") if fits else ""
    )


def payback_plot(report: Report) -> str:
    """Return a plot of the time saved against the time taken, over steps; empty if there is no gain, or nothing was taken."""
    paid, cost_ms = report.paid_back_after, report.cost_ms
    if paid is None or cost_ms <= 0:
        return ""
    # Twice as many, so that the lines cross near the middle.
    steps = _round_up(2 * paid)
    most_ms = max(cost_ms * 1.15, report.gain_ms * steps)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + (right - _LEFT) * step / steps

    def y(ms: float) -> float:
        return bottom - (bottom - _TOP) * ms / most_ms

    parts = [_line(_LEFT, bottom, right, bottom, "axis"), _line(_LEFT, _TOP, _LEFT, bottom, "axis")]
    for share in (0.5, 1.0):
        parts.append(_line(_LEFT, y(share * most_ms), right, y(share * most_ms), "grid"))
        parts.append(_text(_LEFT - 8, y(share * most_ms) + 4, _seconds(share * most_ms), anchor="end"))
        parts.append(_text(x(share * steps), bottom + 18, f"{share * steps:,.0f}", anchor="middle"))
    parts += [
        _text(_LEFT, bottom + 18, "0", anchor="middle"),
        _text((_LEFT + right) / 2, _HEIGHT - 6, "steps (one call of each graph)", anchor="middle"),
        _line(_LEFT, y(cost_ms), right, y(cost_ms), "cost"),
        _text(right + 6, y(cost_ms) + 4, "taken"),
        _line(_LEFT, y(0), right, y(report.gain_ms * steps), "gain"),
        _text(right + 6, y(report.gain_ms * steps) + 4, "saved"),
        f'<circle cx="{x(paid):.1f}" cy="{y(cost_ms):.1f}" r="5" class="gain-dot"/>',
        _text(x(paid) - 8, y(cost_ms) - 10, f"paid back after {paid:,}", anchor="end"),
    ]
    return _svg(_HEIGHT, "Time saved and time taken, over steps", parts)


def _round_up(steps: int) -> int:
    """Return the next number of steps that has one or two digits before its zeros."""
    unit: int = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return math.ceil(steps / unit) * unit


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.3g} s" if ms >= 1e3 else f"{ms:.3g} ms"


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{name}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", name: str = "label") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{name}">{escape(text)}</text>'


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>'
    )
