"""A user's program for these tests: two compiled modules, changing batch sizes, a graph break, training, inference.

It prints the same lines however its graphs are run. Its arguments choose how it asks for compilation and how it ends.
With `--brief` it compiles one of the modules only, for one batch size: six graphs, and a third of the time.
"""

import argparse
import sys

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Scorer(nn.Module):
    """Matrix products alone: no C++ compiler takes its seconds for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 8, bias=False)
        self.second = nn.Linear(8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).squeeze(-1)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default=None)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--enable", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--exit", type=int, default=0)
    return parser.parse_args()


def train(encoder: nn.Module, scorer: nn.Module, batches: tuple[int, ...]) -> None:
    optimizer = torch.optim.SGD([*encoder.parameters(), *scorer.parameters()], lr=0.1)
    for batch in batches:
        x = torch.randn(batch, 16)
        loss = (scorer(encoder(x)) - x.mean(dim=-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"batch {batch}: loss {loss.item():.5f}")


@torch.no_grad()
def infer(encoder: nn.Module, scorer: nn.Module, batches: tuple[int, ...]) -> None:
    for batch in batches:
        print(f"batch {batch}: score {scorer(encoder(torch.randn(batch, 16))).sum().item():.5f}")


def main() -> None:
    chosen = options()
    if chosen.enable:
        import pygraphd

        pygraphd.enable()
    torch.manual_seed(7)
    settings = {"backend": chosen.backend, "mode": chosen.mode}
    encoder, scorer = Encoder(), torch.compile(Scorer(), **settings)
    if chosen.brief:
        train(encoder, scorer, (4, 4))
        infer(encoder, scorer, (4, 4))
    else:
        encoder = torch.compile(encoder, **settings)
        train(encoder, scorer, (4, 6, 5, 4, 9, 6, 4, 5))
        infer(encoder, scorer, (3, 7, 3, 5))
    if chosen.fail:
        raise LookupError("the user's own mistake")
    sys.exit(chosen.exit)


if __name__ == "__main__":
    main()
