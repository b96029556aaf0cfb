"""A recommendation model of the DLRM kind (Naumov et al., 2019), whose forward makes the indices of its interactions on the CPU."""

from __future__ import annotations

import itertools

import torch

from benchmarks.workloads.case import Case, Inputs, Model

_DENSE = 13
_TABLES = 26
_ROWS = 10_000
_WIDTH = 64


class Recommender(torch.nn.Module):
    """Dense features and one category of each table, multiplied with each other; each pair counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = _layers(_DENSE, 512, 256, _WIDTH)
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(_ROWS, _WIDTH) for _ in range(_TABLES))
        pairs = (_TABLES + 1) * _TABLES // 2
        self.top = _layers(_WIDTH + pairs, 512, 256, 1)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Return a number for each item."""
        below = self.bottom(dense)
        looked_up = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        features = torch.stack([below, *looked_up], dim=1)
        products = features @ features.transpose(1, 2)
        # As the original does it: two lists, made at every call.
        rows = torch.tensor([i for i in range(_TABLES + 1) for _ in range(i)])
        columns = torch.tensor([j for i in range(_TABLES + 1) for j in range(i)])
        return self.top(torch.cat([below, products[:, rows, columns]], dim=1))


def _layers(*widths: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def dlrm_inference(device: torch.device, batch: int) -> Case:
    """Return `Recommender` on `batch` items."""

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "dense": torch.randn(batch, _DENSE, device=device, generator=generator),
            "categories": torch.randint(_ROWS, (batch, _TABLES), device=device, generator=generator),
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(inputs["dense"], inputs["categories"])

    return Case(Recommender().to(device), draw, call, precision=torch.float32)
