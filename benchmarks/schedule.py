"""In which order processes run: slow changes of the machine must not fall on one variant alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.variants import Variant
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Turn:
    """One process to come: a workload run by a variant; repetitions count from 0."""

    repetition: int
    workload: Workload
    variant: Variant

    @property
    def name(self) -> str:
        """What no other turn of the repetition is called."""
        return f"{self.workload.name}.{self.variant.name}"


def turns(
    repetition: int, workloads: Sequence[Workload], variants: Sequence[Variant], once: Sequence[Variant] = ()
) -> Iterator[Turn]:
    """Yield one repetition's turns: workload by workload, the variants reversed in every other repetition.

    Variants in `once` run in the first repetition only.
    """
    taking_part = [variant for variant in variants if repetition == 0 or variant not in once]
    ordered = taking_part[::-1] if repetition % 2 else taking_part
    for workload in workloads:
        for variant in ordered:
            yield Turn(repetition, workload, variant)
