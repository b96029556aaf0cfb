"""A program of a few operations, recorded as a relocatable graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.recording.builder import Built
    from tests.support.recorder import Recorder


@dataclass(frozen=True)
class Step:
    """One kernel: which values it reads (by number, modulo how many there are), how long its result is, what dies after it."""

    kind: str
    reads: tuple[int, int, int]
    length: int
    dies: int | None


SIZE = 400


def plain(steps: Sequence[Step], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the value of every step, each in memory of its own."""
    values = list(inputs)
    for step in steps:
        x, y, z = (values[read % len(values)] for read in step.reads)
        if step.kind == "in place":
            n = min(len(x), len(y), step.length)
            if x.data_ptr() != y.data_ptr():
                x[:n] += y[:n]
            continue
        values.append(result(step, x, y, z))
    return values


def result(step: Step, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    if step.kind == "gather":
        return torch.cat([each[:4] for each in (x, y, z)])
    n = min(len(x), len(y), step.length)
    return {"add": x[:n] + y[:n], "scale": x[:n] * 0.5, "copy": x[:n].clone()}[step.kind]


def record(
    recorder: Recorder, steps: Sequence[Step], inputs: Sequence[torch.Tensor]
) -> tuple[Built, list[int]]:
    """Record a program whose temporaries die early; return it and the numbers of the values that it returns."""
    arena, graph, values = recorder.arena, recorder.graph, list(inputs)
    alive = set[int]()
    for step in steps:
        readable = [number for number in range(len(values)) if number < len(inputs) or number in alive]
        x, y, z = (values[read % len(values)] for read in step.reads)
        assert all(read % len(values) in readable for read in step.reads)
        if step.kind == "in place":
            if x.data_ptr() != y.data_ptr():
                graph.accumulate(x[: min(len(x), len(y), step.length)], y)
            continue
        n = 12 if step.kind == "gather" else min(len(x), len(y), step.length)
        out = arena.allocate(n)
        if step.kind == "add":
            graph.add(x, y, out)
        elif step.kind == "scale":
            graph.scale(x, out, 0.5)
        elif step.kind == "copy":
            graph.copy(out, x)
        else:
            graph.gather([each[:4] for each in (x, y, z)], out, magic=x.data_ptr() ^ 0xFFFF)
        values.append(out)
        alive.add(len(values) - 1)
        if step.dies is not None and alive and (dying := sorted(alive)[step.dies % len(alive)]) in alive:
            if step.dies % 3:  # else it is kept to the end, as a library's workspace is
                arena.free(values[dying])
            alive.remove(dying)
    returned = sorted(alive)
    outputs = [arena.allocate(len(values[number]), is_new=True) for number in returned]
    for output, number in zip(outputs, returned, strict=True):
        graph.copy(output, values[number])
    return recorder.built(inputs, outputs), returned


def readable(steps: list[Step], inputs: int) -> list[Step]:
    """Return the steps with each read turned to a value that is still alive then."""
    kept, alive, count = [], list(range(inputs)), inputs
    for step in steps:
        reads = tuple(alive[read % len(alive)] for read in step.reads)
        kept.append(Step(step.kind, (reads[0], reads[1], reads[2]), step.length, step.dies))
        if step.kind == "in place":
            continue
        alive.append(count)
        count += 1
        temporaries = [number for number in alive if number >= inputs]
        if step.dies is not None and temporaries:
            alive.remove(temporaries[step.dies % len(temporaries)])
    return kept
