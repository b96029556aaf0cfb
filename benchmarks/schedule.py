"""In which order processes run: slow changes of the machine must not fall on one peer alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.peers import Peer
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Turn:
    """One process to come: a workload run by a peer; repetitions count from 0."""

    repetition: int
    workload: Workload
    peer: Peer

    @property
    def name(self) -> str:
        """What no other turn of the repetition is called."""
        return f"{self.workload.name}.{self.peer.name}"


def turns(
    repetition: int, workloads: Sequence[Workload], peers: Sequence[Peer], once: Sequence[Peer] = ()
) -> Iterator[Turn]:
    """Yield one repetition's turns: workload by workload, the peers reversed in every other repetition.

    Peers in `once` run in the first repetition only.
    """
    taking_part = [peer for peer in peers if repetition == 0 or peer not in once]
    ordered = taking_part[::-1] if repetition % 2 else taking_part
    for workload in workloads:
        for peer in ordered:
            yield Turn(repetition, workload, peer)
