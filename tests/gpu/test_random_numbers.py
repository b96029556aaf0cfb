"""Random numbers that relocated graphs draw on several streams and in several threads: those that KERNELS would draw."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.stream_affinity import OTHER_STREAM
from tests.support.gpu_programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CALLS = 12
_CYCLES = 3_000_000
"""Of a kernel that keeps the GPU busy for about 2 ms: longer than it takes to call the next graph."""


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x * 2, 0.5)


def dropped_otherwise(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x + 1, 0.5)


def drawn(streams: list[torch.cuda.Stream], runs: list[Callable[..., Any]], x: torch.Tensor) -> list[Any]:
    """Call one graph after the other, each on its stream and behind work of its own there; return which elements were kept."""
    torch.cuda.synchronize()
    torch.cuda.manual_seed(3)
    results = []
    for step in range(CALLS):
        with torch.cuda.stream(streams[step % len(streams)]):
            torch.cuda._sleep(_CYCLES)
            results.append(runs[step % len(runs)](x))
    torch.cuda.synchronize()
    return [each != 0 for each in results]


@pytest.fixture
def runs(relocated: Relocated) -> list[Callable[..., Any]]:
    """Two graphs that draw random numbers, both recorded."""
    x = torch.ones(4096, device="cuda")
    made = [compiled(dropped), compiled(dropped_otherwise)]
    with torch.no_grad():
        for run in made:
            for _ in range(3):
                run(x)
    relocated.expect_all_captured()
    return made


def test_two_graphs_on_two_streams_draw_what_they_draw_on_one(
    relocated: Relocated, runs: list[Callable[..., Any]]
) -> None:
    x = torch.ones(4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        expected = drawn(streams[:1], runs, x)
        replays = sum(replay.counts.replays for each in relocated.made for replay in each.replays)
        assert OTHER_STREAM not in relocated.report.fallbacks  # it may go to a stream when all is done
        found = drawn(streams, runs, x)

    assert all(map(torch.equal, found, expected))
    assert not any(torch.equal(one, other) for one in found for other in found if one is not other)
    # What is on the stream that does not have its turn runs as KERNELS, and the rest does not; from torch 2.13 on each has a state of its own.
    as_kernels = relocated.report.fallbacks[OTHER_STREAM]
    assert 0 < as_kernels < CALLS if torch_private.graphs_share_random_state() else as_kernels == 0
    after = sum(replay.counts.replays for each in relocated.made for replay in each.replays)
    assert after > replays


def test_two_threads_never_draw_the_same(relocated: Relocated, runs: list[Callable[..., Any]]) -> None:
    x, masks = torch.ones(4096, device="cuda"), dict[int, list[Any]]()
    stream, both = torch.cuda.Stream(), threading.Barrier(2)

    def work(number: int) -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            both.wait(60)
            masks[number] = [runs[number](x) != 0 for _ in range(200)]

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()

    together = torch.stack([*masks[0], *masks[1]])
    assert torch.unique(together, dim=0).size(0) == 400
    relocated.expect_all_captured()
