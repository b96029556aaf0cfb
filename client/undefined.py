"""Which outputs of a compiled graph no kernel writes, told from the graph's text. Knows nothing of torch.

Attention hands its backward where its random numbers began. If it drops nothing, that is memory as it was found: each run has
other values there, and comparing them would refuse what is right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Attention:
    """An operator: the position of its `dropout_p`, and which of its results are written if that is not 0, or never."""

    dropout: int
    if_it_drops: frozenset[int]
    never: frozenset[int]


_OPERATORS = {
    "_scaled_dot_product_flash_attention": _Attention(3, frozenset({6}), frozenset({7})),
    "_scaled_dot_product_cudnn_attention": _Attention(5, frozenset({6, 7}), frozenset()),
    "_scaled_dot_product_efficient_attention": _Attention(5, frozenset({2, 3}), frozenset()),
}
_CALL = re.compile(
    rf"^ +(\w+) = torch\.ops\.aten\.({'|'.join(_OPERATORS)})\.default\(([^()]*)\)", re.MULTILINE
)
_RESULT = re.compile(r"^ +(\w+)(?:: \"[^\"]*\")? = (\w+)\[(\d+)\]", re.MULTILINE)
_RETURN = re.compile(r"^ +return \((.*)\)$", re.MULTILINE)
_NAMED_DROPOUT = re.compile(r"dropout_p = (.*)")


def undefined_outputs(text: str) -> frozenset[int]:
    """Return the indices of outputs that hold nothing, in a graph as FX prints it; whatever is not understood is left out."""
    calls = {
        name: _unwritten(_OPERATORS[operator], arguments) for name, operator, arguments in _CALL.findall(text)
    }
    nothing = {name for name, call, item in _RESULT.findall(text) if int(item) in calls.get(call, ())}
    returned = _RETURN.findall(text)
    if not nothing or len(returned) != 1:
        return frozenset()
    return frozenset(
        index for index, name in enumerate(returned[0].split(", ")) if name.strip(",") in nothing
    )


def _unwritten(attention: _Attention, arguments: str) -> frozenset[int]:
    drops = _dropout(arguments.split(", "), attention.dropout) not in {"0.0", "0"}
    return attention.never if drops else attention.never | attention.if_it_drops


def _dropout(arguments: list[str], position: int) -> str:
    for argument in arguments:
        if named := _NAMED_DROPOUT.fullmatch(argument):
            return named[1]
    positional = [argument for argument in arguments if " = " not in argument]
    return positional[position] if position < len(positional) else "0.0"
