"""Graphs with large inputs are recorded without the memory to copy them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend import driver
from pygraphd.client.recording.aliased_memory import AliasedMemory
from pygraphd.client.recording.capture import CudaRecorder

if TYPE_CHECKING:
    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def test_addresses_share_little_memory() -> None:
    size = 8 << 30
    before = torch.cuda.mem_get_info()[0]
    aliased = AliasedMemory(driver.load(), torch.device("cuda", 0), size)
    one, other = (aliased.take(size // 2).view(torch.int64) for _ in range(2))

    aliased.memory.fill_(-2)
    assert other[-1].item() == -2
    one[0] = 7
    assert (aliased.memory != -2).sum().item() == 1
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1":  # others use the device's memory, too
        assert before - torch.cuda.mem_get_info()[0] <= 80 << 20
    aliased.close()


def test_outputs_of_a_capture_on_addresses_do_not_count_as_allocated() -> None:
    size = 32 << 20
    device = torch.device("cuda", 0)
    recorder = CudaRecorder(driver.load(), 0)
    addresses = AliasedMemory(recorder.driver, device, 8 * size)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    made = recorder.capture(
        lambda _: [torch.full((size,), number, dtype=torch.uint8, device=device) for number in range(3)],
        [],
        addresses=addresses,
    )

    assert [each.numel() for each in made.outputs] == [size] * 3
    assert len({each.data_ptr() for each in made.outputs}) == 3
    assert all(addresses.whole.data_ptr() <= each.data_ptr() < addresses.free.end for each in made.outputs)
    assert torch.cuda.memory_allocated() - before < size
    made.discard(recorder.driver)
    addresses.close()


def test_a_bound_of_memory_holds_for_what_is_recorded() -> None:
    free = CudaRecorder(driver.load(), 0).free_bytes()

    assert free > 1 << 20
    assert CudaRecorder(driver.load(), 0, 1 << 20).free_bytes() == 1 << 20


def test_weights_are_not_copied_while_a_graph_is_recorded(relocated: Relocated) -> None:
    with torch.no_grad():
        weights = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        run = torch.compile(
            lambda x: [x := torch.tanh(x @ each) for each in weights][-1], mode="reduce-overhead"
        )
        x = torch.randn(4, 8192, device="cuda", dtype=torch.bfloat16)
        right = run(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()

        results = [run(x) for _ in range(6)]

    assert torch.cuda.max_memory_reserved() - before <= 3 * weights[0].nbytes
    assert all(torch.equal(each, right) for each in results)
    relocated.expect_all_captured()


def test_caches_that_cannot_be_copied_are_recorded(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel writes to one of 16, at rows that lie 2 MiB apart."""

    def step(caches: list[torch.Tensor], at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for cache in caches:
            cache[:, :, at] = x
            x = x + torch.nn.functional.scaled_dot_product_attention(x, cache, cache)
        return x

    with torch.no_grad():
        right = [torch.randn(4, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(16)]
        mine = [each.clone() for each in right]
        free = sum(each.nbytes for each in mine) // 2
        monkeypatch.setattr("pygraphd.client.recording.capture.CudaRecorder.free_bytes", lambda _: free)
        with relocated.as_kernels():
            run_kernels = torch.compile(step, mode="reduce-overhead")
            given = [(torch.tensor([each], device="cuda"), torch.randn(4, 8, 1, 128, device="cuda", dtype=torch.bfloat16)) for each in range(8)]  # fmt: skip
            expected = [run_kernels(right, *each) for each in given]
        run = torch.compile(step, mode="reduce-overhead")
        for each, result in zip(given, expected, strict=True):
            assert torch.equal(run(mine, *each), result)

    assert all(map(torch.equal, mine, right))
    relocated.expect_all_captured()
