"""A speech recognizer of the Speech-Transformer kind (Dong et al., 2018), whose lengths are on the CPU and masks are made there."""

from __future__ import annotations

import torch

from benchmarks.workloads.case import Case, Inputs, Model, cpu_generator
from benchmarks.workloads.transformer import Layer, sinusoids

_FRAMES = 512
_FEATURES = 320
_TOKENS = 64
_VOCABULARY = 4_233
_WIDTH = 512
_HEADS = 8
_LAYERS = 6


class SpeechTransformer(torch.nn.Module):
    """An encoder of recorded frames and a decoder of what was said in them, for recordings of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = torch.nn.Linear(_FEATURES, _WIDTH)
        self.tokens = torch.nn.Embedding(_VOCABULARY, _WIDTH)
        self.encoder = torch.nn.ModuleList(Layer(_WIDTH, _HEADS) for _ in range(_LAYERS))
        self.decoder = torch.nn.ModuleList(Layer(_WIDTH, _HEADS, cross=True) for _ in range(_LAYERS))
        self.norm = torch.nn.LayerNorm(_WIDTH)
        self.output = torch.nn.Linear(_WIDTH, _VOCABULARY)

    def forward(
        self,
        frames: torch.Tensor,
        frame_counts: torch.Tensor,
        tokens: torch.Tensor,
        token_counts: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits for each token; those behind a text's end are zero. The counts may be on the CPU."""
        heard = _padding_mask(frame_counts, frames.shape[1]).to(frames.device)
        values = _positioned(self.frames(frames))
        for layer in self.encoder:
            values = layer(values, heard)
        written = _padding_mask(token_counts, tokens.shape[1])
        earlier = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        mask = (written & earlier).to(frames.device)
        said = _positioned(self.tokens(tokens))
        for layer in self.decoder:
            said = layer(said, mask, values, heard)
        return self.output(self.norm(said)) * written[:, 0, 0, :, None].to(said.device, said.dtype)


def _padding_mask(counts: torch.Tensor, length: int) -> torch.Tensor:
    """Return (batch, 1, 1, position): whether a position is before the end; made where the counts are."""
    return (torch.arange(length, device=counts.device) < counts[:, None])[:, None, None]


def _positioned(values: torch.Tensor) -> torch.Tensor:
    # In float32, and rounded at the end: above 256, bfloat16 has only some of the whole numbers.
    positions = torch.arange(values.shape[1], dtype=torch.float32)
    return values + sinusoids(positions, _WIDTH).to(values.device, values.dtype)


def speech_transformer_inference(device: torch.device, batch: int) -> Case:
    """Return `SpeechTransformer` in bf16; the counts come from the CPU, as a data loader gives them."""
    dtype = torch.bfloat16

    def draw(generator: torch.Generator) -> Inputs:
        on_cpu = cpu_generator(generator)
        return {
            "frames": torch.randn(batch, _FRAMES, _FEATURES, device=device, dtype=dtype, generator=generator),
            "frame_counts": _counts(batch, _FRAMES, on_cpu),
            "tokens": torch.randint(_VOCABULARY, (batch, _TOKENS), device=device, generator=generator),
            "token_counts": _counts(batch, _TOKENS, on_cpu),
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(**inputs)

    return Case(SpeechTransformer().eval().to(device, dtype), draw, call, precision=dtype)


def _counts(batch: int, most: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(most // 2, most + 1, (batch,), device="cpu", generator=generator)
