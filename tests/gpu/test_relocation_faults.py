"""What may go wrong while a call is recorded, on a GPU: the result is right, the reason is told, and memory is as before."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.recording import budget, comparison, recordings, verification
from tests.support.gpu_programs import compiled, x
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MB = 1 << 20
SLACK = 2 * MB
"""What a generator keeps of its state, if a capture has failed."""


def reserved() -> int:
    """Return what the allocator has reserved when all has gone that nobody holds."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    size: int = torch.cuda.memory_reserved()
    return size


def chain(a: torch.Tensor) -> torch.Tensor:
    return ((a @ a).sin() @ a).cos()


# --- verification ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["output", "input"])
def test_a_recording_that_never_agrees_is_not_used_and_leaves_nothing(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    found = comparison.Disagreement(f"{what} 0 differs", in_values=True)
    differs = str(found)
    monkeypatch.setattr(verification, "compare", lambda *_: found)
    run = compiled(chain)
    a = torch.randn(1024, 1024, device="cuda")
    expected = run(a)
    before = reserved()

    for _ in range(6):
        assert torch.equal(run(a.clone()), expected)

    assert relocated.report.counts["captured"] == 0
    assert any(differs in reason for reason in relocated.report.fallbacks)
    assert differs in str(refusal_of(relocated.made[0]))
    assert reserved() <= before + SLACK


def test_a_graph_with_an_input_whose_address_is_hidden_runs_as_kernels(relocated: Relocated) -> None:
    """No node shows it, and the recording reads what lay there."""
    from tests.support.triton_kernels import hidden

    run = compiled(lambda x: hidden(x) + 1)
    inputs = [x() for _ in range(10)]
    results = [run(each) for each in inputs]

    for each, result in zip(inputs, results, strict=True):
        assert torch.equal(result, each + 1)
    assert relocated.report.counts["captured"] == 0
    assert any(reason.startswith("verification: output 0 differs") for reason in relocated.report.fallbacks)
    assert relocated.made[0].refused_for_good


# --- memory ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """Let this process reserve so much more than it has."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((reserved() + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def recorder_of(run_kernels: Callable[[list[Any]], Any], relocated: Relocated) -> recordings.Recordings:
    from pygraphd.client.backend import driver
    from pygraphd.client.recording.capture import CudaRecorder

    return recordings.Recordings(run_kernels, CudaRecorder(driver.load(), 0), relocated.report)


def test_memory_may_run_out_at_any_point_of_recording(relocated: Relocated) -> None:
    """A call of 64 MB and one result: as much as that is left, and then more and more."""
    a = x(16 << 20)
    expected = compiled(lambda a: (a * 2 + 1).sin())(a)
    run_kernels = relocated.made[0]._run_kernels
    before, refusals = reserved(), []
    for left in (80, 144, 208, 272, 336, 1024):
        run = recorder_of(run_kernels, relocated)
        run([a])
        for _ in range(2):
            with room(left * MB):
                (result,) = run([a])
            assert torch.equal(result, expected)  # which needs some more
            del result
        refusals.append(refusal_of(run))
        run.close()
        del run
        assert reserved() <= before + SLACK

    for refusal in filter(None, refusals):
        assert refusal == budget.NO_MEMORY_TO_VERIFY or "out of memory" in refusal
        assert relocated.report.fallbacks[refusal] > 0
    assert refusals[0] is not None
    assert refusals[-1] is None


@pytest.mark.parametrize("at", ["beginning", "end"])
def test_memory_may_run_out_within_a_capture(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    from pygraphd.client.recording.capture_pool import CapturePool

    original = CapturePool.capturing

    @contextlib.contextmanager
    def capturing(pool: CapturePool, graph: Any) -> Iterator[None]:
        with original(pool, graph):
            if at == "end":
                yield
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. For a test.")

    run = compiled(chain)
    a = torch.randn(1024, 1024, device="cuda")
    expected = run(a)
    before = reserved()
    with monkeypatch.context() as patch:
        patch.setattr(CapturePool, "capturing", capturing)
        for _ in range(3):
            assert torch.equal(run(a.clone()), expected)

    assert refusal_of(relocated.made[0]) == "CUDA out of memory. For a test."
    assert not relocated.made[0].refused_for_good
    assert relocated.report.fallbacks["CUDA out of memory. For a test."] == 3
    assert reserved() <= before + SLACK
    torch.randn(10, device="cuda")  # random numbers and other captures go on
    other = compiled(lambda a: torch.nn.functional.dropout(a.sin(), 0.5))
    for _ in range(4):
        other(a)
    assert relocated.report.counts["captured"] == 1
