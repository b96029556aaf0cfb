"""What the tests of relocated programs compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(
        function, mode="reduce-overhead", **{"dynamic": False, **options}
    )
    return made


def affine(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sin()


def x(n: int = 1000) -> torch.Tensor:
    return torch.randn(n, device="cuda")


def warm(run: Callable[..., Any], *inputs: Any, calls: int = 3) -> None:
    for _ in range(calls):
        run(*inputs)


def network(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.LayerNorm(64)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).cuda()


def losses(
    run: Callable[..., Any],
    parameters: list[torch.nn.Parameter],
    optimizer: str = "SGD",
    micro_batches: int = 1,
    steps: int = 12,
) -> list[float]:
    torch.manual_seed(1)
    chosen = getattr(torch.optim, optimizer)(parameters, lr=0.01)
    seen = []
    for _ in range(steps):
        for _ in range(micro_batches):
            batch = torch.randn(32, 64, device="cuda")
            loss = (run(batch) - batch[:, :8]).square().mean()
            loss.backward()
            seen.append(loss.detach())
        chosen.step()
        chosen.zero_grad(set_to_none=True)
    return [loss.item() for loss in seen]
