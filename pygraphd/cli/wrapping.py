"""Lines that fit a terminal. What is too long goes on below, aligned; a pipe or a file gets each line as it is."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NARROWEST = 40
"""Columns that a line may take in a terminal with fewer: names and values would not stand beside each other."""
_OUTDENT = 2


def terminal_width() -> int | None:
    """Return the number of columns of the terminal that standard output is; None if it is none."""
    return max(shutil.get_terminal_size().columns, _NARROWEST) if sys.stdout.isatty() else None


def wrapped(line: str, indent: int = 0) -> str:
    """Return a line, in a terminal continued behind `indent` spaces where it would be too long."""
    width = terminal_width()
    return line if width is None else "\n".join(folded(line, indent, width))


def paragraph(text: str) -> str:
    """Return lines of running text, in a terminal broken anew."""
    return text if terminal_width() is None else wrapped(text.replace("\n", " "))


def folded(line: str, indent: int, width: int) -> Iterator[str]:
    """Yield a line in pieces of at most `width` characters, broken between words and continued behind `indent` spaces.

    Words before the indent stay where they are, as names before their values. A word that is too long behind the indent, as a path may be,
    gets a line of its own, and is cut only if it is longer than a line.
    """
    if len(line) <= width:
        yield line
        return
    piece = line[:indent] if line[:indent].endswith(" ") else ""
    is_begun = False
    for word in line[len(piece) :].split(" "):
        longer = f"{piece} {word}" if is_begun else f"{piece}{word}"
        if len(longer) <= width:
            piece, is_begun = longer, True
            continue
        # A piece that is nothing but its indent would be an empty line.
        if piece.strip():
            yield piece.rstrip()
        # Less indent rather than two pieces: a path that is cut cannot be copied.
        piece = " " * min(indent, max(width - len(word), 0)) + word
        while len(piece) > width:
            yield piece[:width]
            piece = " " * min(indent, _OUTDENT) + piece[width:]
        is_begun = True
    yield piece
