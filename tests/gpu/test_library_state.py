"""Fourier transforms and decompositions: libraries hold kernels and memory for them, so that each call runs them, and what is around is recorded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.watched import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 80
"""More than it takes to record, measure and decide."""
N = 24


def of_length(n: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a transform of real numbers, and back."""
    return lambda x: torch.fft.irfft(torch.fft.rfft(x, n=n) * 2, n=n)


def stft(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(120, device=x.device)
    return torch.stft(x.flatten(), 120, 30, window=window, return_complex=True).abs()


TRANSFORMS = {
    "prime length": of_length(131),
    "plain length": of_length(1000),
    "stft": stft,
}
DECOMPOSITIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "eigenvalues": torch.linalg.eigvalsh,
    "inverses": torch.linalg.inv,
    "one inverse": lambda x: torch.linalg.inv(x[0]),
    "solutions": lambda x: torch.linalg.solve(x, x.mT),
    "factors": lambda x: torch.linalg.cholesky(x @ x.mT),
    "singular values": torch.linalg.svdvals,
    "least squares": lambda x: torch.linalg.lstsq(x, x[..., :2]).solution,
}


def drawn() -> torch.Tensor:
    return torch.randn(6, N, N, device="cuda") + 8 * torch.eye(N, device="cuda")


def drop_plans() -> list[torch.Tensor]:
    """Have PyTorch free its plans, and other memory take their place; return that."""
    torch.cuda.synchronize()
    torch.backends.cuda.cufft_plan_cache.clear()
    for n in (137, 139, 149, 2053):  # they have tables
        torch.fft.fft(torch.randn(4, n, device="cuda", dtype=torch.complex64))
    torch.cuda.empty_cache()
    return [torch.full((1 << 19,), float("nan"), device="cuda") for _ in range(64)]


def around(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function with work that can be recorded before it and after it."""
    return lambda x: torch.relu(function((x * 1.5).contiguous()) * 2) + 1


@pytest.mark.parametrize("name", [*TRANSFORMS, *DECOMPOSITIONS])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["default", "reduce-overhead"])
def test_each_call_runs_it_though_plans_go(watched: Watched, mode: str | None, name: str) -> None:
    function = around({**TRANSFORMS, **DECOMPOSITIONS}[name])
    run, held = torch.compile(function, mode=mode, dynamic=False), list[torch.Tensor]()
    for step in range(STEPS):
        x = drawn()
        torch.testing.assert_close(run(x), function(x), rtol=1e-3, atol=1e-3)
        if step == STEPS // 2 and name in TRANSFORMS:
            held = drop_plans()
    del held

    watched.expect()
    assert watched.report.counts["captured"] >= 1, watched.reasons()
    # The partition after it is given tensors, and not what it returns.
    assert not any("is a tuple" in each for each in watched.reasons())


def test_gradients_pass_through_it(watched: Watched) -> None:
    function = around(lambda x: torch.linalg.cholesky(x @ x.mT) + torch.fft.irfft(torch.fft.rfft(x), n=N))
    run = torch.compile(function, dynamic=False)
    for step in range(STEPS):
        x = drawn().requires_grad_()
        (mine,), (right,) = (torch.autograd.grad(each(x).square().sum(), x) for each in (run, function))
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-2)
        if step == STEPS // 2:
            drop_plans()

    watched.expect()
    assert watched.report.counts["captured"] >= 2, watched.reasons()


def test_threads_with_streams_of_their_own_share_it(watched: Watched) -> None:
    function = around(torch.linalg.inv)
    run, wrong = torch.compile(function, dynamic=False), list[str]()
    run(drawn())

    def serve() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(STEPS):
                    x = drawn()
                    torch.testing.assert_close(run(x), function(x), rtol=1e-3, atol=1e-3)
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")
            raise

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    watched.expect()
