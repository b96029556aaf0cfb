"""Two hundred dynamic sizes of 1 to 4 MB: recordings and memory stay bounded, with relocatable graphs alone and with the whole hook."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.recording import recordings, recordings_by_size
from tests.support.gpu_programs import affine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.relocated import Relocated
    from tests.support.watched import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MB = 1 << 20
SIZES = range(MB // 4, MB, 3 * MB // 4 // 200)
"""Of floats."""
MOST = 256 * MB
"""Reserved at any time: some 20 tensors of the largest size, as the allocator rounds them up, and not one for each size."""


def device_memory() -> int:
    """Return what is in use of the device, by whomever."""
    free, total = torch.cuda.mem_get_info()
    used: int = total - free
    return used


def run_through(run: Callable[..., Any], sizes: Iterable[int]) -> None:
    with torch.no_grad():
        for n in sizes:
            a = torch.randn(n, device="cuda")
            torch.testing.assert_close(run(a), affine(a))


class Memory:
    """What there is before a test, to be held against what there is after it."""

    def __init__(self) -> None:
        self._used = self._after_cleaning()
        torch.cuda.reset_peak_memory_stats()

    def _after_cleaning(self) -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return device_memory()

    def expect_bounded(self) -> None:
        assert torch.cuda.max_memory_reserved() < MOST
        used = self._after_cleaning()
        assert torch.cuda.memory_reserved() < 64 * MB
        if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1":  # others use the device's memory, too
            assert used - self._used < MOST


@pytest.fixture
def memory() -> Memory:
    return Memory()


def with_scratch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return a number for each row of `x`; a temporary takes 16 MB for each."""
    return ((x @ w).sin() @ w.T).sum(1)


def test_sizes_share_scratch_whatever_their_order(relocated: Relocated, memory: Memory) -> None:
    """The allocator would keep scratch of each size, where the next one is larger."""
    w = torch.randn(64, 8 * MB, device="cuda", dtype=torch.float16) / 64
    run, rows = torch.compile(with_scratch, mode="reduce-overhead", dynamic=True), (4, 8, 12, 16)

    def call(n: int) -> None:
        x = torch.randn(n, 64, device="cuda", dtype=torch.float16)
        torch.testing.assert_close(run(x, w), with_scratch(x, w), rtol=0.05, atol=0.5)

    with torch.no_grad():
        for n in (*rows, *rows, *rows):
            call(n)
        torch.cuda.empty_cache()
        for n in (*rows, *rows):
            x = torch.randn(n, 64, device="cuda", dtype=torch.float16)
            run(x, w)

    [region] = relocated.made
    assert len(region.replays) == len(rows)
    assert all(replay.counts.replays >= 3 for replay in region.replays)
    largest = max(replay.scratch_bytes for replay in region.replays)
    assert largest >= 16 * 8 * MB * 2
    assert torch.cuda.memory_reserved() < w.nbytes + largest + 128 * MB


def test_relocatable_graphs_of_two_hundred_sizes(relocated: Relocated, memory: Memory) -> None:
    assert len(SIZES) >= 200
    run = torch.compile(affine, mode="reduce-overhead", dynamic=True)
    for _ in range(3):
        run_through(run, SIZES)

    memory.expect_bounded()
    [region] = relocated.made
    assert (
        relocated.report.counts["captured"] == recordings_by_size.CAPTURES_OF_EACH * recordings.MAX_RECORDINGS
    )
    assert len(region.replays) == recordings.MAX_RECORDINGS
    before = sum(replay.counts.replays for replay in region.replays)
    run_through(run, [size for (size, *_) in [slot.size for slot in region._recorded()] for _ in range(3)])
    after = sum(replay.counts.replays for replay in region.replays)
    assert after - before == 3 * recordings.MAX_RECORDINGS


def test_the_whole_hook_with_two_hundred_sizes(watched: Watched, memory: Memory) -> None:
    run = torch.compile(affine, dynamic=True)
    few = SIZES[: watched.session.options.sizes.sizes]
    run_through(run, [size for _ in range(80) for size in few])
    captured = watched.report.counts["captured"]
    for _ in range(3):
        run_through(run, SIZES)

    memory.expect_bounded()
    watched.expect(graphs=1)
    assert captured > 0
    assert watched.report.counts["captured"] <= recordings_by_size.CAPTURES_OF_EACH * len(few)
