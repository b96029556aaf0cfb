"""Finds, in a printed FX graph, outputs that depend on sums of atomic additions, whose bits differ from run to run. Imports no torch.

The gradient of an embedding is one: its rows are added in whichever order the GPU's blocks come to them.
"""

from __future__ import annotations

import re

from pygraphd.client.analysis.fx_text import returned

_ASSIGNMENT = re.compile(r'^ +(\w+)(?:: "[^"]*")? = ([^;\n]+)', re.MULTILINE)
_SUM = re.compile(
    r"torch\.ops\.aten\.(?:(?:_unsafe_)?index_put_?\.\w+\(.*, True\)$|\w*_accumulate\.|embedding_dense_backward\."
    r"|(?:scatter_add|scatter_reduce|index_add|index_reduce)_?\.)"
)
_IN_PLACE = re.compile(r"torch\.ops\.\w+\.\w+_\.\w+\((\w+)")
_NAME = re.compile(r"\w+")


def atomic_outputs(text: str) -> frozenset[int]:
    """Return the indices of the outputs of a printed graph that depend on a sum of atomic additions; none if the text is not understood."""
    names = returned(text)
    found = set[str]()
    # One pass is enough: FX prints a value before its uses.
    for name, expression in _ASSIGNMENT.findall(text):
        if _SUM.match(expression.strip()) or not found.isdisjoint(_NAME.findall(expression)):
            found.add(name)
            found.update(_IN_PLACE.findall(expression))
    return frozenset(index for index, name in enumerate(names or ()) if name in found)
