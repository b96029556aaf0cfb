"""Reads the inputs and outputs of a printed FX graph, and which inputs it overwrites. Imports no torch."""

from __future__ import annotations

import re

_SIGNATURE = re.compile(r"^ *def forward\(self, (.*)\):?", re.MULTILINE)
_INPUT = re.compile(r'(\w+)(?:: "[^"]*")?(?:, |$|(?=\)))')
_RETURN = re.compile(r"^ +return \((.*)\)$", re.MULTILINE)
_OVERWRITES = re.compile(
    r'^ +\w+(?:: "[^"]*")? = torch\.ops\.aten\.(?:copy_\.default\((\w+), \w+\)|_foreach_\w+_\.\w+\(\[([^]]*)\])',
    re.MULTILINE,
)
"""Operators in place that write all elements, with an argument or a list of arguments that they write."""
_IN_PART = re.compile(r"torch\.ops\.aten\.(?!copy_\.|_foreach_)\w*(?:_\.|scatter|index_put)")
"""Operators that may write some elements of an input. A copy of their result to the input writes no more than they do, or is left out."""


def taken(text: str) -> list[str] | None:
    """Return the names of a graph's inputs in order; None if the text is not understood."""
    # Subgraphs are printed with the graph: of several signatures, none is known to be the graph's own.
    signatures = _SIGNATURE.findall(text)
    return _INPUT.findall(signatures[0]) if len(signatures) == 1 else None


def tangents(text: str) -> frozenset[int]:
    """Return the indices of the inputs of a backward that are gradients of the forward's outputs."""
    return frozenset(at for at, name in enumerate(taken(text) or ()) if name.startswith("tangents_"))


def returned(text: str) -> list[str] | None:
    """Return the names of a graph's outputs in order, "None" among them; None if the text is not understood."""
    found = _RETURN.findall(text)
    return [name.strip(",") for name in found[0].split(", ")] if len(found) == 1 else None


def overwritten_inputs(text: str) -> frozenset[int]:
    """Return the indices of the inputs all of whose elements a printed graph overwrites, as an optimizer's step does its parameters.

    None are returned of a graph that may write to parts of tensors. An input that is copied to itself may be among them.
    """
    if _IN_PART.search(text):
        return frozenset()
    written = _OVERWRITES.findall(text)
    names = {name for one, several in written for name in (one, *several.split(", "))}
    return frozenset(index for index, name in enumerate(taken(text) or ()) if name in names)
