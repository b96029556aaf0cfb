"""Keeps inputs that a replay writes on the host, where copies on the device would raise the process's peak memory.

Only inputs that nothing else can use meanwhile: those donated to a backward, and those of which the graph writes every element.
Another stream or thread may write to other parts of the rest, as to pages of a KV cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pygraphd.client.recording.stand_ins import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.recording.alias_sets import InputGroups
    from pygraphd.client.replay.relocation_table import Span
    from pygraphd.client.replay.segments import InputGroup

MIN_BYTES = 1 << 20
"""Smaller inputs are copied on the device."""
MIN_HOST_BYTES = 32 << 20
"""With fewer bytes in the large inputs that a graph writes, these are copied on the device: it raises the peak by little."""
MAX_HOST_BYTES = 2 << 30
"""With more bytes, copying them to the host and back would take seconds."""


def for_host(
    groups: InputGroups, inputs: Sequence[Any], facts: GraphFacts, device: torch.device
) -> InputGroups:
    """Return the groups of inputs that may be kept on the host while a replay writes them; none if that is not worth it."""
    chosen = [
        (group, span)
        for group, span in groups
        if span.size > MIN_BYTES
        and inputs[group.members[0][0]].device == device
        and _is_ours_alone(group, span, inputs, facts)
    ]
    return chosen if MIN_HOST_BYTES <= sum(span.size for _, span in chosen) <= MAX_HOST_BYTES else []


def _is_ours_alone(group: InputGroup, span: Span, inputs: Sequence[Any], facts: GraphFacts) -> bool:
    """Return whether nothing but this call can use any byte of a group."""
    indices = [index for index, _ in group.members]
    # Donated inputs are activations that only this backward sees.
    if facts.donated.issuperset(indices):
        return True
    # The group may be wider than its input: it may cover a storage that other tensors lie in, too.
    whole = inputs[indices[0]]
    fills = whole.numel() * whole.itemsize == span.size
    return fills and len(indices) == 1 and indices[0] in facts.overwritten


class HostCopies:
    """The values of some inputs, copied to the host."""

    def __init__(self, inputs: Sequence[Any], groups: InputGroups) -> None:
        """Copy the inputs of these groups. Raises the error of `bytes_of`."""
        self.indices = frozenset(index for group, _ in groups for index, _ in group.members)
        places = [bytes_of(inputs[group.members[0][0]], span) for group, span in groups]
        self._pairs = [(place, place.to("cpu", copy=True)) for place in places]

    def put_back(self) -> None:
        """Give the inputs their values again, also if it is interrupted."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        while self._pairs:
            place, kept = self._pairs[-1]
            place.copy_(kept)
            # After the copy: if that is interrupted, `put_back` makes it once more.
            self._pairs.pop()
