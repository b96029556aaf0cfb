"""Lengths of time as people write and read them: "90", "30m", "1.5h", "30d"."""

from __future__ import annotations

import re

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PATTERN = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw]?)")


def parse_duration(text: str) -> float:
    """Return the seconds in `text`; raises ValueError that lists the accepted forms."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r:.40} is no length of time: give seconds, or 30m, 12h, 30d, 4w")
    return float(match[1]) * _SECONDS[match[2]]


def human_duration(seconds: float) -> str:
    """Return a length of time in its largest whole unit: 59s, 3m, 2h, 5d."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{int(max(seconds, 0))}s"
