"""A language model of the XLNet kind (Yang et al., 2019), whose forward makes its relative positions on the CPU.

transformers' XLNet did so until 2026 (huggingface/transformers#44782); this is our own, which goes on doing so.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Inputs, Model
from benchmarks.workloads.transformer import FeedForward, sinusoids

_TOKENS = 512
_VOCABULARY = 32_000
_WIDTH = 768
_HEADS = 12
_LAYERS = 12


class RelativeAttention(torch.nn.Module):
    """Attention whose scores have a part for the content and one for the distance, each with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.positions = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.output = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        shape = (_HEADS, 1, _WIDTH // _HEADS)
        self.content_bias = torch.nn.Parameter(torch.randn(shape) / 50)
        self.position_bias = torch.nn.Parameter(torch.randn(shape) / 50)

    def forward(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the output; `positions` are of all distances, from the farthest before to the farthest behind."""
        query, key, value = (_split(part) for part in self.project(values).chunk(3, dim=-1))
        distance = _split(self.positions(positions)[None])
        content = (query + self.content_bias) @ key.transpose(-1, -2)
        position = _shift((query + self.position_bias) @ distance.transpose(-1, -2))
        weights = functional.softmax((content + position) / math.sqrt(_WIDTH // _HEADS), dim=-1)
        return self.output((weights @ value).transpose(1, 2).flatten(2))


def _split(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(-1, (_HEADS, -1)).transpose(1, 2)


def _shift(scores: torch.Tensor) -> torch.Tensor:
    """Move each row one less to the left than the row above, so that a column is a position and no distance."""
    batch, heads, rows, distances = scores.shape
    turned = scores.reshape(batch, heads, distances, rows)[:, :, 1:]
    return turned.reshape(batch, heads, rows, distances - 1)[..., :rows]


class RelativeLayer(torch.nn.Module):
    """A layer that normalizes after each of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = RelativeAttention()
        self.feed_forward = FeedForward(_WIDTH)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(_WIDTH) for _ in range(2))

    def forward(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the values after this layer."""
        values = self.norms[0](values + self.attention(values, positions))
        return self.norms[1](values + self.feed_forward(values))


class RelativeLanguageModel(torch.nn.Module):
    """Embedding, layers, and logits by the same embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = torch.nn.ModuleList(RelativeLayer() for _ in range(_LAYERS))
        # As in XLNet. PyTorch's standard deviation would be 1, and these weights make the logits as well.
        torch.nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits for each token."""
        values = self.embedding(tokens)
        length = tokens.shape[1]
        positions = sinusoids(torch.arange(length, -length, -1.0), _WIDTH).to(values.device, values.dtype)
        for layer in self.layers:
            values = layer(values, positions)
        return functional.linear(values, self.embedding.weight)


def xlnet_inference(device: torch.device, batch: int) -> Case:
    """Return `RelativeLanguageModel` in bf16."""
    return Case(
        RelativeLanguageModel().eval().to(device, torch.bfloat16),
        lambda generator: {"tokens": _tokens(device, batch, generator)},
        _logits,
        precision=torch.bfloat16,
    )


def xlnet_training(device: torch.device, batch: int) -> Case:
    """Return `RelativeLanguageModel` in float32 under bf16 autocast, trained by AdamW."""

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "tokens": _tokens(device, batch, generator),
            "labels": _tokens(device, batch, generator),
        }

    return Case(
        RelativeLanguageModel().train().to(device),
        draw,
        _loss,
        precision=torch.bfloat16,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        autocast=torch.bfloat16,
    )


def _tokens(device: torch.device, batch: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(_VOCABULARY, (batch, _TOKENS), device=device, generator=generator)


def _logits(model: Model, inputs: Inputs) -> torch.Tensor:
    return model(inputs["tokens"])


def _loss(model: Model, inputs: Inputs) -> torch.Tensor:
    return functional.cross_entropy(model(inputs["tokens"]).flatten(0, 1), inputs["labels"].flatten())
