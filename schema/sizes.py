"""Sizes of memory as people write and read them: "4096", "256MB", "1.5GiB"."""

from __future__ import annotations

import re

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
# ASCII: \d alone matches the digits of other scripts, too.
_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(|[kmg]i?)b?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes in `text`; raises ValueError that lists the accepted forms."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r:.40} is no size: give bytes, or 256MB, 1GiB; 0 for no limit")
    return int(float(match[1]) * _BYTES[match[2].lower()])


def size_text(size: float) -> str:
    """Return a number of bytes in its largest unit: 256 MB, 1.5 GB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} bytes"
