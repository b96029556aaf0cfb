"""Tells false pointers from addresses by a second capture of the call: in other memory, an address has another value.

A structure that is passed to a kernel has padding, which holds leftovers of the host's memory. A 4-byte number beside 4 bytes of padding makes
a word. If the padding holds the upper half of an old address, the word reads as an address, and relocating it would corrupt the number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend.errors import DisturbedError
from pygraphd.client.recording.capture import Capture
from pygraphd.client.replay.relocation_table import RelocationTable, Span, find, merge

if TYPE_CHECKING:
    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.recording.alias_sets import InputGroups
    from pygraphd.client.replay.node_params import Parameters

UNDECIDABLE = "two captures of it cannot tell an address from a number"
CAPTURES_DIFFER = "two captures of it are not of the same kernels"
_HALF = 1 << 32


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A capture, and the inputs that it was made on."""

    capture: Capture
    inputs: Sequence[Any]
    memory: Sequence[torch.Tensor] = ()
    """The memory of the inputs, as tensors over all its addresses."""


Recapture = Callable[[], CapturedCall]
"""Captures the call again in other memory."""


@dataclass(frozen=True, slots=True)
class MovedSpan:
    """A range of addresses in the first capture, and the address of the same memory in the second one."""

    span: Span
    to: int


def find_false_pointers(
    driver: Driver,
    parameters: Parameters,
    table: RelocationTable,
    first: CapturedCall,
    groups: InputGroups,
    recapture: Recapture,
) -> frozenset[int]:
    """Return the indices of ambiguous words that are no addresses, by a second capture. Raises `FallbackError` or what `recapture` does."""
    second = recapture()
    try:
        words = parameters.of_another(second.capture.graph, table.ambiguous)
        if words is None:
            raise DisturbedError(CAPTURES_DIFFER)
        given = [Span(each.data_ptr(), each.data_ptr() + each.nbytes) for each in second.memory]
        spans = merge((*given, *second.capture.spans, *second.capture.held))
        moved = functools.partial(moved_spans, first, second, groups)
        return false_addresses(table.ambiguous, parameters.words, words, spans, moved)
    finally:
        second.capture.discard(driver)


def moved_spans(first: CapturedCall, second: CapturedCall, groups: InputGroups) -> list[MovedSpan]:
    """Return where the second capture has all memory of the first one. Raises `FallbackError` if the two differ in allocations."""
    made, again = first.capture.allocations, second.capture.allocations
    if [span.size for span in made] != [span.size for span in again]:
        raise DisturbedError(CAPTURES_DIFFER)
    # Both captures run the same code, so that their allocations correspond by order.
    moved = [MovedSpan(span, to.start) for span, to in zip(made, again, strict=True)]
    for group, span in groups:
        mine, other = (each.inputs[group.members[0][0]] for each in (first, second))
        moved.append(MovedSpan(span, span.start + other.data_ptr() - mine.data_ptr()))
        # A kernel may be given the address of a storage, which is another one in the second capture.
        begin, there = (each.untyped_storage().data_ptr() for each in (mine, other))
        moved.append(MovedSpan(Span(begin, begin), there))
    return moved


def false_addresses(
    ambiguous: Iterable[int],
    words: Sequence[int],
    other_words: Mapping[int, int],
    spans: Sequence[Span],
    moved: Callable[[], Sequence[MovedSpan]],
) -> frozenset[int]:
    """Return the indices of those words that are no addresses, given the words of the second capture by index.

    `spans` is all memory of the second capture, sorted and disjoint; none of it was memory of the first one. `moved` is called only if a word
    is an address in both captures, and the two differ by a multiple of 4 GiB: the upper half may then be stale. Raises `FallbackError` if the
    word has moved as far as the memory that it would point to: then it may be an address or a number.
    """
    found = set()
    known: Sequence[MovedSpan] | None = None
    for index in ambiguous:
        here, there = words[index], other_words[index]
        # The end of a span is an address of it, too.
        if find(spans, there) is None and find(spans, there - 1) is None:
            found.add(index)
        elif not (there - here) % _HALF:
            # The lower half stayed, as a number does. The upper half is a leftover, unless the memory has moved as far.
            known = moved() if known is None else known
            if any(
                each.to - each.span.start == there - here
                for each in known
                if each.span.start <= here <= each.span.end
            ):
                raise DisturbedError(UNDECIDABLE)
            found.add(index)
    return frozenset(found)
