"""Trains a graph convolutional network with PyTorch Geometric on a random graph of Cora's size, and tests it after every epoch."""

from typing import Any

import torch
from measuring import DEVICE, Clock, compiled, run
from torch.nn import functional
from torch_geometric.nn import GCNConv


class GCN(torch.nn.Module):
    """Two graph convolutions with dropout."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, hidden)
        self.second = GCNConv(hidden, classes)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, p=0.5, training=self.training)
        x = self.first(x, edges).relu()
        x = functional.dropout(x, p=0.5, training=self.training)
        return self.second(x, edges)


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` epochs."""
    nodes, edge_count, features, classes = (60, 200, 32, 4) if tiny else (2708, 10556, 1433, 7)
    labels = torch.randint(classes, (nodes,))
    x = (torch.rand(nodes, features) < 0.02).float()
    x[torch.arange(nodes), labels] = 1.0
    x, labels = (x / x.sum(1, keepdim=True)).to(DEVICE), labels.to(DEVICE)
    edges = torch.randint(nodes, (2, edge_count)).to(DEVICE)
    trained = (torch.randperm(nodes) < nodes // 4).to(DEVICE)

    model = GCN(features, 16, classes).to(DEVICE)
    network = compiled(model, mode)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    clock = Clock(steps)
    for _ in range(steps):
        clock.begin()
        model.train()
        optimizer.zero_grad()
        out = network(x, edges)
        loss = functional.cross_entropy(out[trained], labels[trained])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = network(x, edges).argmax(-1) == labels
        clock.end(loss)
    accuracy = [right[part].float().mean().item() for part in (trained, ~trained)]
    # Sums over edges are in no fixed order, and without compiling other units are dropped.
    return clock.result(tolerance=0.05, eager_tolerance=0.15, accuracy=accuracy)


if __name__ == "__main__":
    run(main, __doc__)
