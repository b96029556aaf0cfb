"""What only looks like an address, told by a second capture of the call: in other memory, an address is another one.

Structures that kernels are given have gaps, in which lies what the host had there before: half of an address, say. With a number below
it, as it has in the memory of the program, that reads as an address near the beginning of 4 GiB. Of 1,042 recordings of ResNet-50's forward and backward
whose memory lay anywhere, two that held such a word ended the process, and two were wrong (H200, torch 2.11, cuDNN 9.19).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.backend.errors import UnfitError
from pygraphd.client.replay.relocation_table import Span, find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

UNCLEAR = "what is an address in it could not be told"
OTHERWISE = "two captures of it are not of the same kernels"
_HALF = 1 << 32


class UnclearError(UnfitError):
    """A word is what an address would be in two captures, and what half of one beside a number would be; another capture may tell."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__(UNCLEAR)


@dataclass(frozen=True, slots=True)
class Moved:
    """Memory of the first capture, and where the second one has what lies there."""

    span: Span
    to: int


def false_addresses(
    doubtful: Iterable[int],
    words: Sequence[int],
    elsewhere: Mapping[int, int],
    spans: Sequence[Span],
    moved: Callable[[], Sequence[Moved]],
) -> frozenset[int]:
    """Return which of some words are no addresses, in view of what they are `elsewhere`, by index.

    `spans` are all of the memory that the second capture worked on, sorted and disjoint; none of it may have been the first one's. `moved` tells where
    it has what, and is asked only where both captures have an address for a word, but one that differs in the half alone that may lie in a
    gap, as it may in large models. Raises `UnclearError` if it is the very address that it would be.
    """
    found = set()
    places: Sequence[Moved] | None = None
    for index in doubtful:
        here, there = words[index], elsewhere[index]
        # Where a span ends is an address of it, too.
        if find(spans, there) is None and find(spans, there - 1) is None:
            found.add(index)
        elif not (there - here) % _HALF:
            places = moved() if places is None else places
            if any(each.to - each.span.start == there - here for each in places if _holds(each.span, here)):
                raise UnclearError
            found.add(index)
    return frozenset(found)


def _holds(span: Span, address: int) -> bool:
    return span.start <= address <= span.end
