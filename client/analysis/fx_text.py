"""Reads the names of inputs and outputs from a printed FX graph. Imports no torch."""

from __future__ import annotations

import re

_SIGNATURE = re.compile(r"^ *def forward\(self, (.*)\):?", re.MULTILINE)
_INPUT = re.compile(r'(\w+)(?:: "[^"]*")?(?:, |$|(?=\)))')
_RETURN = re.compile(r"^ +return \((.*)\)$", re.MULTILINE)


def inputs(text: str) -> list[str] | None:
    """Return the names of a graph's inputs in order; None if the text is not understood."""
    signatures = _SIGNATURE.findall(text)
    return _INPUT.findall(signatures[0]) if len(signatures) == 1 else None


def returned(text: str) -> list[str] | None:
    """Return the names of a graph's outputs in order, "None" among them; None if the text is not understood."""
    found = _RETURN.findall(text)
    return [name.strip(",") for name in found[0].split(", ")] if len(found) == 1 else None
