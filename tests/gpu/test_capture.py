"""What a capture has the GPU do, which is nothing, as kernels on its stream have all graphs take longer, and where it allocates."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend import driver
from pygraphd.client.recording import capture
from pygraphd.client.recording.capture import CudaRecorder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CAPTURES = 4


def test_captures_have_the_gpu_launch_no_kernel(tmp_path: Path) -> None:
    """What draws random numbers, for which PyTorch makes ready as a capture begins, and products, which have a library do so."""
    x = torch.randn(64, 64, device="cuda")
    recorder = CudaRecorder(driver.load(), 0)

    def program() -> torch.Tensor:
        return torch.nn.functional.dropout(x @ x, 0.5)

    program()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(CAPTURES):
            recorder.capture(lambda _: [program()], []).discard(recorder.driver)
        x.cos_()  # that one is seen
        torch.cuda.synchronize()

    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert ["cos" in each for each in kernels] == [True], kernels


def test_a_shifted_capture_allocates_the_same_elsewhere() -> None:
    """Small and large, in their order, and nothing beside; what begins a pool does not begin the other one."""
    x = torch.randn(512, 512, device="cuda")
    recorder = CudaRecorder(driver.load(), 0)

    def program() -> list[torch.Tensor]:
        return [x[0] * 2, x @ x, torch.cat([x] * 3)]

    program()
    plain, shifted = (recorder.capture(lambda _: program(), [], is_shifted=each) for each in (False, True))

    spans, others = plain.allocations, shifted.allocations
    assert len(spans) >= 3
    assert [span.size for span in spans] == [span.size for span in others]
    begin = plain.outputs[0].data_ptr() % (2 << 20), shifted.outputs[0].data_ptr() % (2 << 20)
    assert begin[1] - begin[0] == capture.SHIFTS[0]
    plain.discard(recorder.driver)
    shifted.discard(recorder.driver)


@pytest.mark.parametrize("is_shifted", [False, True])
def test_temporaries_that_grow_lie_in_the_same_memory_on_a_ground(is_shifted: bool) -> None:
    """The ground itself is none of the capture's allocations, and nothing of it is left."""
    recorder = CudaRecorder(driver.load(), 0)
    sizes = [(12 << number) << 20 for number in range(4)]

    def program() -> list[torch.Tensor]:
        total = torch.zeros(1, device="cuda")
        for size in sizes:
            total = total + torch.ones(size, dtype=torch.uint8, device="cuda")[-1]
        return [total]

    program()
    apart = recorder.capture(lambda _: program(), [])
    used = apart.bytes
    apart.discard(recorder.driver)
    reserved = torch.cuda.memory_reserved()
    together = recorder.capture(lambda _: program(), [], backing=sum(sizes), is_shifted=is_shifted)

    assert [span.size for span in together.allocations] == [span.size for span in apart.allocations]
    assert used >= sum(sizes)
    assert together.bytes < max(sizes) + (2 << 20)
    together.discard(recorder.driver)
    assert torch.cuda.memory_reserved() <= reserved


def more_than_is_free() -> int:
    """Return bytes that fit into no gap that earlier tests have left on the first GPU: they get a segment of their own."""
    gaps = (
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if segment["device"] == 0 and block["state"] == "inactive"
    )
    return int(max(gaps, default=0)) + (64 << 20)


def test_memory_goes_back_while_another_thread_captures_on_another_gpu() -> None:
    """In CUDA's default mode, in which a call that frees memory in any thread ends the capture."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    recorder = CudaRecorder(driver.load(), 0)
    x, graph, outputs = torch.ones(64, device="cuda:1"), torch.cuda.CUDAGraph(), list[torch.Tensor]()
    begun, over = threading.Event(), threading.Event()

    def capture_elsewhere() -> None:
        # Without a stream it would be that of the first capture of the process, which may be one of another GPU.
        stream = torch.cuda.Stream(1)
        with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
            begun.set()
            over.wait(60)
            outputs.append(x + 1)

    thread = threading.Thread(target=capture_elsewhere)
    torch.cuda.empty_cache()
    free = torch.empty(size := more_than_is_free(), dtype=torch.uint8, device="cuda:0")
    thread.start()
    assert begun.wait(60)
    try:
        del free
        reserved = torch.cuda.memory_reserved(0)
        recorder.trim()
        given_back = reserved - torch.cuda.memory_reserved(0)
    finally:
        over.set()
        thread.join(60)

    assert given_back >= size
    graph.replay()
    torch.cuda.synchronize(1)
    assert outputs[0].tolist() == [2.0] * 64
