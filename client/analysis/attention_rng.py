"""Finds, in a printed FX graph, the RNG state that attention passes from a forward to its backward. Imports no torch.

The state is the seed and offset of dropout. Without dropout no kernel writes it, so its values differ from run to run, and verification
must not compare them. Memory-efficient attention has it on the CPU in KERNELS, and on the GPU in a GRAPH.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.analysis.fx_text import returned, taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class _Attention:
    """An attention operator: the position of its `dropout_p`, and the results that it writes only if that is not 0, or never in full."""

    dropout: int
    if_it_drops: frozenset[int]
    never: frozenset[int]


_EFFICIENT = "_scaled_dot_product_efficient_attention"
_LENGTHS = "_efficient_attention_forward"
"""The operator for sequences of several lengths, as nested tensors have them."""
_OPERATORS = {
    "_scaled_dot_product_flash_attention": _Attention(3, frozenset({6}), frozenset({7})),
    "_scaled_dot_product_cudnn_attention": _Attention(5, frozenset({6, 7}), frozenset()),
    _EFFICIENT: _Attention(5, frozenset({2, 3}), frozenset()),
    # Its sums of exponentials (1) have room for the longest sequence, and are written and read as far as each one goes.
    _LENGTHS: _Attention(8, frozenset({2, 3}), frozenset({1})),
}
_CALL = re.compile(
    rf"^ +(\w+) = torch\.ops\.aten\.({'|'.join(_OPERATORS)})\.default\(([^()]*)\)", re.MULTILINE
)
_RESULT = re.compile(r"^ +(\w+)(?:: \"[^\"]*\")? = (\w+)\[(\d+)\]", re.MULTILINE)
_NAMED_DROPOUT = re.compile(r"dropout_p = (.*)")


def undefined_outputs(text: str) -> frozenset[int]:
    """Return the indices of outputs of a printed graph that no kernel writes in full. Unknown uses of an operator are left out."""
    calls = {
        name: _unwritten(_OPERATORS[operator], arguments) for name, operator, arguments in _CALL.findall(text)
    }
    nothing = {name for name, call, item in _RESULT.findall(text) if int(item) in calls.get(call, ())}
    names = returned(text) or []
    return frozenset(index for index, name in enumerate(names) if name in nothing)


def _unwritten(attention: _Attention, arguments: str) -> frozenset[int]:
    drops = _drops(arguments.split(", "), attention.dropout)
    return attention.never if drops else attention.never | attention.if_it_drops


def _drops(arguments: list[str], position: int) -> bool:
    named = [found[1] for argument in arguments if (found := _NAMED_DROPOUT.fullmatch(argument))]
    positional = [argument for argument in arguments if " = " not in argument]
    # An argument with the schema's default is not printed; for dropout that is 0.
    return next(iter(named or positional[position:]), "0.0") not in {"0.0", "0"}


# --- values on the CPU or on the GPU ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RngState:
    """The scalars of a graph that are on the CPU in KERNELS and on the GPU in a GRAPH, by index.

    The scalars of attention without dropout are `idle`: nothing reads or writes them.
    """

    seeds: tuple[int, ...] = ()
    """Outputs that hold a seed."""
    offsets: tuple[int, ...] = ()
    """Outputs that hold an offset, in the order of their seeds."""
    idle_outputs: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    """Inputs that hold a seed or an offset."""
    idle_inputs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the graph has any scalars of RNG state."""
        return any((self.drawn, self.idle_outputs, self.inputs, self.idle_inputs))

    @property
    def drawn(self) -> tuple[int, ...]:
        """The outputs that kernels write."""
        return self.seeds + self.offsets

    def of_partition(self, inputs: Sequence[int | None], outputs: Sequence[Sequence[int]]) -> RngState:
        """Return the scalars of a partition, whose inputs and outputs are mapped as in `PartitionMap`."""
        taken = [(each,) for each in inputs]
        return RngState(
            _where(outputs, self.seeds),
            _where(outputs, self.offsets),
            _where(outputs, self.idle_outputs),
            _where(taken, self.inputs),
            _where(taken, self.idle_inputs),
        )


def _where(mine: Sequence[Sequence[int | None]], of_graph: Iterable[int]) -> tuple[int, ...]:
    """Map indices of the graph to indices of a partition; those that the partition lacks are left out."""
    return tuple(index for each in of_graph for index, own in enumerate(mine) if each in own)


_MOVING = "_efficient_attention"
_STATE = {2: "seeds", 3: "offsets"}
"""The results of both operators that hold a seed or an offset."""
_BACKWARDS = {f"{_EFFICIENT}_backward": (7, 8, 9), "_efficient_attention_backward": (12, 13, 11)}
"""Positions of seed, offset and `dropout_p` among the arguments of the backward operators."""
_BACKWARD = re.compile(rf"torch\.ops\.aten\.({'|'.join(_BACKWARDS)})\.default\(([^()]*)\)")
_ANY_CALL = re.compile(rf"torch\.ops\.\w+\.\w*{_MOVING}\w*\.")
# Else names in comments, and in the `x = None` by which FX frees values, would count as uses.
_NOT_CODE = re.compile(r"^ *#.*$|;  (?:\w+ = )+None$", re.MULTILINE)


def has_rng_state(text: str) -> bool:
    """Return whether a graph may have scalars of `RngState`."""
    return _MOVING in text


def rng_state_of(text: str) -> RngState | None:
    """Return the RNG state of a printed graph; None if it is used for more than passing it to a backward."""
    if not has_rng_state(text):
        return RngState()
    try:
        return _Reading(_NOT_CODE.sub("", text)).state()
    except _NotUnderstoodError:
        return None


class _NotUnderstoodError(Exception):
    """A graph uses RNG state in another way, or its text cannot be parsed."""


class _Reading:
    """The text of one graph, and the names in it."""

    def __init__(self, code: str) -> None:
        takes, returns = taken(code), returned(code)
        if takes is None or returns is None:
            raise _NotUnderstoodError
        self._code, self._takes, self._returns = code, takes, returns
        self._uses = Counter(re.findall(r"\w+", code))
        self._results = {(call, int(item)): name for name, call, item in _RESULT.findall(code)}

    def state(self) -> RngState:
        """Return the state of all operators of the graph."""
        forwards = [call for call in _CALL.findall(self._code) if call[1] in {_EFFICIENT, _LENGTHS}]
        backwards = _BACKWARD.findall(self._code)
        # A call that the patterns miss might pass the state on unseen.
        if len(forwards) + len(backwards) != len(_ANY_CALL.findall(self._code)):
            raise _NotUnderstoodError
        found: dict[str, list[int]] = {}
        for name, operator, arguments in forwards:
            drops = _drops(arguments.split(", "), _OPERATORS[operator].dropout)
            for item, kind in _STATE.items():
                kept = self._handed_over(self._results.get((name, item)))
                found.setdefault(kind if drops else "idle_outputs", []).extend(kept)
        for operator, arguments in backwards:
            (*state, dropout), given = _BACKWARDS[operator], arguments.split(", ")
            kind = "inputs" if _drops(given, dropout) else "idle_inputs"
            found.setdefault(kind, []).extend(self._taken(given[position]) for position in state)
        return RngState(**{kind: tuple(indices) for kind, indices in found.items()})

    def _handed_over(self, name: str | None) -> list[int]:
        """Return, as a list, the index of the output that holds a result; an empty list if nothing uses the result."""
        if name is None or self._uses[name] == 1:
            return []
        # Once where it is assigned, and once where it is returned.
        if self._uses[name] == 2 and name in self._returns:
            return [self._returns.index(name)]
        raise _NotUnderstoodError

    def _taken(self, name: str) -> int:
        """Return the index of an input whose only user is this operator."""
        if self._uses[name] == 2 and name in self._takes:
            return self._takes.index(name)
        raise _NotUnderstoodError
