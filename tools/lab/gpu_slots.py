"""GPU slots: the GPUs of a host, each with its share of the cores and of the workloads, side by side.

What compiles or is measured in one slot shares neither GPU nor cores with another. It does share the host's memory and caches.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from benchmarks.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that says which GPUs a process sees."""


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """A GPU, by the variables of a process that is to see no other, and cores; `cores` None: all."""

    number: int
    environ: tuple[tuple[str, str], ...] = ()
    cores: frozenset[int] | None = None

    def enter(self) -> None:
        """Have this thread, and the processes that it starts, run on the slot's cores."""
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)


def gpu_slots(count: int) -> tuple[GpuSlot, ...]:
    """Return `count` slots with equal shares of the cores; raises BenchmarkError if there are fewer cores than slots."""
    # Nothing to share out: the process keeps the GPUs and cores that it was given.
    if count == 1:
        return (GpuSlot(0),)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // count
    if not share:
        raise BenchmarkError(f"--gpus {count}: there are {len(cores)} cores, and each GPU needs one")
    names = gpu_names(count)
    return tuple(
        GpuSlot(number, ((VISIBLE, names[number]),), frozenset(cores[number * share : (number + 1) * share]))
        for number in range(count)
    )


def joined(slots: Sequence[GpuSlot]) -> GpuSlot:
    """Return slots as one, for a program that takes several GPUs."""
    names = ",".join(name for each in slots for key, name in each.environ if key == VISIBLE)
    cores = [each.cores for each in slots if each.cores is not None]
    return GpuSlot(slots[0].number, ((VISIBLE, names),), frozenset().union(*cores) if cores else None)


def gpu_names(count: int) -> list[str]:
    """Return the names of `count` GPUs as in `VISIBLE`; raises BenchmarkError if it names fewer."""
    told = os.environ.get(VISIBLE)
    # Text and no numbers: the variable may name GPUs by UUID.
    names = told.split(",") if told else list(map(str, range(count)))
    if len(names) < count:
        raise BenchmarkError(f"--gpus {count}: {VISIBLE} names {len(names)}")
    return names[:count]


def dealt(items: Sequence[T], slot: GpuSlot, count: int) -> tuple[T, ...]:
    """Return a slot's share of items, which are dealt out in turn."""
    return tuple(items[slot.number :: count])


def parts(items: Sequence[T], size: int | None) -> list[Sequence[T]]:
    """Return items in parts of a size, the last maybe smaller; all in one if it is None."""
    step = size or max(1, len(items))
    return [items[begin : begin + step] for begin in range(0, len(items), step)]
