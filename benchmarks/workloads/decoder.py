"""A decoder of language models with layers as large as Llama 3 70B's, whose weights and cache fill four fifths of the GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from benchmarks.correctness import Verdict
from benchmarks.workloads.case import Case, Inputs, Model

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.step import Step

_DTYPE = torch.bfloat16
_NUMBER_BYTES = 2
# With so much of it taken, a run shows whether recording and verification find room.
_FILLED = 0.8
"""Share of the GPU's memory that weights and cache take."""
_MOST_OFF = 0.05
"""Distance of logits, or of what was written to the cache, to eager's in the same precision, relative to their norm."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model; `length` is that of the cache, in tokens of each text."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.width // self.heads

    def layer_bytes(self, batch: int) -> int:
        """Return the bytes of a layer's weights and cache."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        weights = self.width * (qkv + self.width + 3 * self.hidden)
        return _NUMBER_BYTES * (weights + 2 * batch * self.kv_heads * self.length * self.head)


# No layers yet: `sizes_for` says how many fit the GPU.
_LARGE = Sizes(layers=0, width=8192, heads=64, kv_heads=8, hidden=28_672, vocabulary=32_000, length=4096)
_SMALL = Sizes(layers=2, width=64, heads=8, kv_heads=2, hidden=128, vocabulary=100, length=16)


class CachedAttention(torch.nn.Module):
    """Grouped-query attention of one token over a cache that it writes in place."""

    def __init__(self, sizes: Sizes, batch: int) -> None:
        super().__init__()
        self.parts = [each * sizes.head for each in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
        self.kv_heads, self.head = sizes.kv_heads, sizes.head
        self.qkv = _linear(sizes.width, sum(self.parts))
        self.output = _linear(sizes.width, sizes.width)
        shape = (batch, sizes.kv_heads, sizes.length, sizes.head)
        # Random numbers and no zeros, so that reading at a wrong place shows in the logits.
        self.register_buffer("keys", torch.randn(shape, dtype=_DTYPE))
        self.register_buffer("values", torch.randn(shape, dtype=_DTYPE))

    def forward(self, x: torch.Tensor, place: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return what the token of each text, of shape (batch, width), finds in the cache up to `place`."""
        query, key, value = self.qkv(x).split(self.parts, -1)
        self.keys.index_copy_(2, place, key.unflatten(-1, (self.kv_heads, 1, -1)))
        self.values.index_copy_(2, place, value.unflatten(-1, (self.kv_heads, 1, -1)))
        # The heads that share keys are as many rows of one query, so that nothing is repeated.
        queries = query.unflatten(-1, (self.kv_heads, -1, self.head))
        found = functional.scaled_dot_product_attention(queries, self.keys, self.values, attn_mask=seen)
        return self.output(found.flatten(1))


class Layer(torch.nn.Module):
    """Attention and a gated feed-forward part, each behind a norm and a residual connection."""

    def __init__(self, sizes: Sizes, batch: int) -> None:
        super().__init__()
        self.attention = CachedAttention(sizes, batch)
        self.gate = _linear(sizes.width, sizes.hidden)
        self.up = _linear(sizes.width, sizes.hidden)
        self.down = _linear(sizes.hidden, sizes.width)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(sizes.width, dtype=_DTYPE) for _ in range(2))

    def forward(self, x: torch.Tensor, place: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return the values of the tokens after this layer."""
        x = x + self.attention(self.norms[0](x), place, seen)
        normal = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normal)) * self.up(normal))


class Decoder(torch.nn.Module):
    """One token's logits for each text; `place` is the token's entry in the cache."""

    def __init__(self, sizes: Sizes, batch: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(sizes.vocabulary, sizes.width, dtype=_DTYPE)
        self.layers = torch.nn.ModuleList(Layer(sizes, batch) for _ in range(sizes.layers))
        self.norm = torch.nn.RMSNorm(sizes.width, dtype=_DTYPE)
        self.output = _linear(sizes.width, sizes.vocabulary)
        self.register_buffer("places", torch.arange(sizes.length))

    def forward(self, tokens: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, vocabulary) for what follows `tokens`, of shape (batch,)."""
        x = self.embedding(tokens)
        seen = self.places <= place
        for layer in self.layers:
            x = layer(x, place, seen[None, None, None])
        return self.output(self.norm(x))


def _linear(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, bias=False, dtype=_DTYPE)


def sizes_for(total_bytes: int, batch: int) -> Sizes:
    """Return the sizes that fill four fifths of a GPU with so many bytes: 24 layers on 80 GB, 42 on 141 GB."""
    # The embedding and the output have a matrix each.
    ends = 2 * _NUMBER_BYTES * _LARGE.vocabulary * _LARGE.width
    layers = int((_FILLED * total_bytes - ends) / _LARGE.layer_bytes(batch))
    return replace(_LARGE, layers=layers)


def decoder_inference(device: torch.device, batch: int) -> Case:
    """Return `Decoder` for a GPU, or a small one on the CPU. Each step decodes a token of each text, at a place of its own."""
    sizes = _SMALL
    if device.type == "cuda":
        sizes = sizes_for(torch.cuda.get_device_properties(device).total_memory, batch)

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "tokens": torch.randint(sizes.vocabulary, (batch,), device=device, generator=generator),
            "place": torch.randint(sizes.length, (1,), device=device, generator=generator),
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        logits: torch.Tensor = model(inputs["tokens"], inputs["place"])
        return logits

    return Case(Decoder(sizes, batch).eval().to(device), draw, call, precision=_DTYPE, check=check)


def check(case: Case, step: Step, _device: torch.device, draw: Callable[[], Inputs]) -> Verdict:
    """Compare a step with eager in the same precision: there is no room for a copy of the model on the device."""
    for _ in range(2):
        inputs = draw()
        found = _results(case, step.evaluate, inputs)
        with torch.no_grad():
            expected = _results(case, functools.partial(case.call, case.module), inputs)
        for name, value in expected.items():
            off = float((found[name] - value).norm() / value.norm())
            if not off <= _MOST_OFF:  # so that NaN fails
                return Verdict(False, f"{name} is off by {off:.3g} of its norm, {_MOST_OFF} allowed")
    return Verdict(True, "compared with eager in the same precision")


def _results(
    case: Case, evaluate: Callable[[Inputs], torch.Tensor], inputs: Inputs
) -> dict[str, torch.Tensor]:
    """Return the logits, and the entries of the cache that were written for them; they are zero before."""
    caches = {name: each for name, each in case.module.named_buffers() if each.dim() == 4}
    for each in caches.values():
        each.index_fill_(2, inputs["place"], 0)
    logits = evaluate(inputs).float()
    return {
        "logits": logits,
        **{name: each.index_select(2, inputs["place"]).float() for name, each in caches.items()},
    }
