"""Train a small transformer to sort numbers, then test it: plain PyTorch, compiled with CUDA Graphs in mind.

Run it with `python quickstart.py`, or with PyGraph's help, unchanged: `PYGRAPH=1 python quickstart.py`.
"""

import statistics
import time

import torch
from torch import nn

VOCABULARY = 32
LENGTH = 16
BATCH = 32
WIDTH = 128
TRAINING_STEPS = 300
TEST_BATCHES = 200
WINDOW = 10
REPORT = 100


class Block(nn.Module):
    """Self-attention and a feed-forward layer, each behind a layer norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed_forward(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class Sorter(nn.Module):
    """Reads a sequence of numbers and predicts, for every position, the number that belongs there."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(WIDTH, heads=4), Block(WIDTH, heads=4))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.numbers(numbers) + self.positions))


def batch_of(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
    return numbers, numbers.sort(dim=1).values


def train(model: nn.Module, device: str) -> list[float]:
    """Return the seconds per step, averaged over windows: only reading the loss waits for the device."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    seconds = []
    start = time.perf_counter()
    for step in range(1, TRAINING_STEPS + 1):
        numbers, target = batch_of(device)
        loss = nn.functional.cross_entropy(model(numbers).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % WINDOW == 0:
            value = loss.item()
            seconds.append((time.perf_counter() - start) / WINDOW)
            if step % REPORT == 0:
                print(f"step {step:4}  loss {value:.3f}")
            start = time.perf_counter()
    return seconds


@torch.no_grad()
def evaluate(model: nn.Module, device: str) -> tuple[float, list[float]]:
    """Return the share of numbers that are put where they belong, and the seconds of each batch."""
    model.eval()
    shares, seconds = [], []
    for _ in range(TEST_BATCHES):
        numbers, target = batch_of(device)
        start = time.perf_counter()
        shares.append((model(numbers).argmax(dim=-1) == target).float().mean().item())
        seconds.append(time.perf_counter() - start)
    return statistics.mean(shares), seconds


def pace(seconds: list[float]) -> str:
    median = statistics.median(seconds)
    return f"{1000 * median:.2f} ms per step (median), {1 / median:.0f} steps/s"


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.compile(Sorter().to(device), mode="reduce-overhead")
    print(f"training on {device}: {pace(train(model, device))}")
    accuracy, seconds = evaluate(model, device)
    print(f"testing on {device}: {accuracy:.1%} of the numbers in their place, {pace(seconds)}")


if __name__ == "__main__":
    main()
