"""Nothing of PyGraph grows with the models that a process compiles, runs and drops."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.decisions.decision_service import MAX_UNRECORDED
from tests.support.compiled import compile_once, relocating, run, session
from tests.support.user_program import Run
from tests.support.user_program import run as run_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.client.frontend.runtime import Runtime

__all__ = ["relocating", "run_program", "session"]  # fixtures

pytestmark = pytest.mark.torch

MODELS = 200
LINES_OF_A_MODEL = 6
"""On average: three partitions, each of which a dynamic model has at two sizes, too."""
FIXED = "def forward(self, arg0_1):\n  a = torch.ops.aten.add.Tensor(b, {number})"
DYNAMIC = 'def forward(self, arg0_1: "Sym(s77)", arg1_1):\n  a = torch.ops.aten.add.Tensor(b, {number})'
BOUNDED = {"_decisions", "_dropped", "_environments", "_reasons", "_spooled", "_unrecorded", "failures"}
"""Containers with a bound of their own: the decisions and reasons that a summary lists, and what waits for the next compilation or request."""
LINES = {"Report._facts", "Bundle._entries", "Bundle._own"}
"""Containers with a line for each graph or size that was decided, up to 10,000: for the summary and for the bundle."""
CONTAINERS = (dict, list, set, deque, Counter, BoundedLRU)


def ours(root: object) -> dict[str, int]:
    """Return the sizes of all containers that objects of PyGraph hold, reached from one of them, by class and attribute."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[object] = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (*CONTAINERS, tuple)):
            todo += value.values() if isinstance(value, dict) else value
        elif type(value).__module__.startswith("pygraphd.client"):
            for name, held in attributes(value):
                if isinstance(held, CONTAINERS) and name not in BOUNDED:
                    sizes[f"{type(value).__name__}.{name}"] += len(held)
                todo.append(held)
    return dict(sizes)


def attributes(value: object) -> Iterator[tuple[str, Any]]:
    names = {*getattr(value, "__dict__", {})}
    for each in type(value).__mro__:
        names.update(getattr(each, "__slots__", ()))
    yield from (
        (name, getattr(value, name)) for name in sorted(names - {"__weakref__"}) if hasattr(value, name)
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def use(runtime: Runtime, number: int, steps: int) -> list[weakref.ref[Any]]:
    """Compile, run and drop a model that no other is equal to, of fixed sizes or with two dynamic ones; return what has to go with it."""
    is_dynamic = bool(number % 2)
    box, text = BoxedDeviceIndex(0), (DYNAMIC if is_dynamic else FIXED).format(number=number)
    forward = compile_once(runtime, 2, backward=False, box=box, text=text)
    backward = compile_once(runtime, 1, backward=True, box=box, text=text)
    pair = weakref.ref(runtime.pair(box))
    if not is_dynamic:
        run(forward, backward, steps)
    else:
        for size in [8, 16] * steps:
            forward.current_callable([torch.ones(1), size])
            backward.current_callable([torch.ones(1), size])
    slots = forward.compiled_fn_runner.partitions + backward.compiled_fn_runner.partitions
    return [pair, *map(weakref.ref, slots)]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 40], ids=["undecided", "decided"])
def test_containers_are_where_they_were_after_two_hundred_models(
    session: Runtime, relocating: list[Any], steps: int
) -> None:
    gone: list[weakref.ref[Any]] = []
    for number in range(4):
        gone += use(session, number, steps)
    relocating.clear()
    gc.collect()
    before, resident = ours(session), resident_bytes()

    for number in range(4, 4 + MODELS):
        gone += use(session, number, steps)
        relocating.clear()
    gc.collect()

    assert [each() for each in gone] == [None] * len(gone)
    after = ours(session)
    grown = {name: size - before.get(name, 0) for name, size in after.items() if size > before.get(name, 0)}
    assert grown.keys() <= LINES
    assert max(grown.values()) == MODELS * LINES_OF_A_MODEL  # so no two models were equal
    assert len(session.decisions._pending) == 0
    assert resident_bytes() - resident < 16 * 2**20, (
        "of which the decisions that the summary lists are a part"
    )
    assert len(session.decisions._unrecorded) + len(session.decisions._dropped) <= 2 * MAX_UNRECORDED


PROGRAM = """
import gc, json, tracemalloc
from collections import Counter
import torch
torch.compiler.config.force_disable_caches = True

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def use(number):
    model = torch.compile(torch.nn.Linear(8, 8 + number, bias=False))
    model(torch.randn(3, 8)).sum().backward()
    del model
    torch._dynamo.reset()

def objects():
    gc.collect()
    types = (type(each) for each in gc.get_objects())
    return Counter(each.__qualname__ for each in types if str(each.__module__).startswith("pygraphd."))

def traced():
    gc.collect()
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/client/*")])
    return sum(each.size for each in traces.statistics("filename"))

for number in range(10):
    use(number)
before, mapped = objects(), rss()
for number in range(10, 10 + COMPILED - TRACED):
    use(number)
tracemalloc.start()
allocated = traced()
for number in range(10 + COMPILED - TRACED, 10 + COMPILED):
    use(number)
print(json.dumps([objects() - before, traced() - allocated, rss() - mapped]))
"""
COMPILED = 200
"""Real compilations, each of a third of a second: what one of them left behind would be there two hundred times."""
TRACED = 15
"""The last of these, whose allocations are traced, with which each takes four times as long."""
LINE = {"Decision", "Deployed", "Entry", "Graph", "Portable", "Reason", "Record", "Spooled"}
"""What a graph's line in the summary, and what the daemon has yet to be told of it, are made of."""


@pytest.mark.slow
def test_memory_is_where_it_was_after_two_hundred_compilations(run_program: Run) -> None:
    """What PyGraph allocates and keeps for a graph is its line in the summary: at most 2 KB. PyTorch keeps more."""
    program = PROGRAM.replace("COMPILED", str(COMPILED)).replace("TRACED", str(TRACED))

    outcome = run_program(program)

    grown, kept, mapped = json.loads(outcome.output)
    assert outcome.summary["graphs"] == 2 * (10 + COMPILED)
    assert set(grown) <= LINE
    assert max(grown.values(), default=0) <= 2 * COMPILED, grown  # of each at most one for a graph
    assert kept <= 2 * TRACED * 2048, kept
    assert mapped <= 300 * 2**20, mapped
