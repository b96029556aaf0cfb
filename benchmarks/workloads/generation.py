"""An encoder and decoder of the T5 kind (Raffel et al., 2020) that generate text in a loop, with a step counter on the CPU."""

from __future__ import annotations

import math

import torch

from benchmarks.workloads.case import Case, Inputs, Model
from benchmarks.workloads.transformer import Attention, FeedForward, Layer

_WIDTH = 512
_HEADS = 8
_LAYERS = 6
_VOCABULARY = 32_128
_SOURCE = 64
_CACHE = 64
_GENERATED = 16
# As many as T5 has, and as far as they reach there.
_BUCKETS = 32
_FARTHEST = 128


class Encoder(torch.nn.Module):
    """What is read once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = torch.nn.ModuleList(Layer(_WIDTH, _HEADS) for _ in range(_LAYERS))
        self.norm = torch.nn.LayerNorm(_WIDTH)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Return the values that the decoder looks at."""
        values = self.embedding(source)
        for layer in self.layers:
            values = layer(values)
        return self.norm(values)


class CachedLayer(torch.nn.Module):
    """A decoder's layer for one token at a time, which keeps the keys and values of those before it."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.attention = Attention(_WIDTH, _HEADS)
        self.cross = Attention(_WIDTH, _HEADS)
        self.feed_forward = FeedForward(_WIDTH)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(_WIDTH) for _ in range(3))
        shape = (batch, _HEADS, _CACHE, _WIDTH // _HEADS)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(
        self, token: torch.Tensor, place: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """Return the token's values after this layer; `place` is the cache's entry for it."""
        normal, own = self.norms[0](token), self.attention
        self.keys.index_copy_(2, place, own.split(own.key(normal)))
        self.values.index_copy_(2, place, own.split(own.value(normal)))
        token = token + own.attend(own.split(own.query(normal)), self.keys, self.values, bias)
        token = token + self.cross(self.norms[1](token), memory, None)
        return token + self.feed_forward(self.norms[2](token))


class DecoderStep(torch.nn.Module):
    """One token's logits from the one before it. The distances to all entries of the cache are made on the CPU."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(_VOCABULARY, _WIDTH)
        self.distances = torch.nn.Embedding(_BUCKETS, _HEADS)
        self.layers = torch.nn.ModuleList(CachedLayer(batch) for _ in range(_LAYERS))
        self.norm = torch.nn.LayerNorm(_WIDTH)
        self.output = torch.nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, step: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Return logits for what follows the tokens; `step`, a number on the CPU, says how many came before them."""
        values = self.embedding(tokens)[:, None]
        distances = step - torch.arange(_CACHE)
        seen = (distances >= 0).to(values.device)
        bias = self.distances(_buckets(distances).to(values.device)).T[None, :, None]
        bias = bias.masked_fill(~seen, float("-inf"))
        place = step.to(values.device).reshape(1)
        for layer in self.layers:
            values = layer(values, place, bias, memory)
        return self.output(self.norm(values[:, 0]))


def _buckets(distances: torch.Tensor) -> torch.Tensor:
    """Return a number for each distance: its own for half of them, and fewer and fewer for those that are farther."""
    exact = _BUCKETS // 2
    near = distances.clamp(min=0)
    scale = (_BUCKETS - exact) / math.log(_FARTHEST / exact)
    far = exact + (torch.log(near.clamp(min=1) / exact) * scale).long()
    return torch.where(near < exact, near, far.clamp(max=_BUCKETS - 1))


class Generator(torch.nn.Module):
    """Generates a text; the loop is ordinary code, and each token a call of one graph."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = DecoderStep(batch)

    # Dynamo would unroll the loop. Not recursive: the encoder and the decoder are compiled all the same.
    @torch.compiler.disable(recursive=False)
    def forward(self, source: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token. Sampled by Gumbel's noise from outside: it decides as in any other precision."""
        memory = self.encoder(source)
        tokens = source[:, 0].clone()  # laid out as those that follow: the decoder is compiled once
        step = torch.zeros((), dtype=torch.long)
        scores = torch.empty_like(noise)
        for kept, each in zip(scores, noise, strict=True):
            logits = self.decoder(tokens, step, memory)
            # Copied, since PyTorch's CUDA graphs write the logits of the next token over these.
            kept.copy_(logits)
            tokens = (logits + each).argmax(dim=-1)
            step += 1
        return scores


def t5_generation(device: torch.device, batch: int) -> Case:
    """Return `Generator` of the size of T5-small in float32."""

    def draw(generator: torch.Generator) -> Inputs:
        uniform = torch.rand(_GENERATED, batch, _VOCABULARY, device=device, generator=generator)
        return {
            "source": torch.randint(_VOCABULARY, (batch, _SOURCE), device=device, generator=generator),
            # Neither 0 nor 1, for which a logarithm is infinite or the next one is.
            "noise": -torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6))),
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(inputs["source"], inputs["noise"])

    return Case(Generator(batch).eval().to(device), draw, call, precision=torch.float32)
