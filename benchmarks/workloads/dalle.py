"""A decoder of the DALL-E kind (Ramesh et al., 2021), whose forward makes the masks of its kinds of attention on the CPU."""

from __future__ import annotations

import torch

from benchmarks.workloads.case import Case, Inputs, Model
from benchmarks.workloads.transformer import Layer

_TEXT = 64
_SIDE = 16
_TEXT_VOCABULARY = 16_384
_IMAGE_VOCABULARY = 8_192
_WIDTH = 512
_HEADS = 8
_LAYERS = 12


class TextToImage(torch.nn.Module):
    """Tokens of a text, then those of an image, of which most layers see those of the same row, column or surroundings."""

    def __init__(self) -> None:
        super().__init__()
        self.text = torch.nn.Embedding(_TEXT_VOCABULARY, _WIDTH)
        self.image = torch.nn.Embedding(_IMAGE_VOCABULARY, _WIDTH)
        self.positions = torch.nn.Parameter(torch.randn(_TEXT + _SIDE**2, _WIDTH) / 50)
        self.layers = torch.nn.ModuleList(Layer(_WIDTH, _HEADS) for _ in range(_LAYERS))
        self.norm = torch.nn.LayerNorm(_WIDTH)
        self.output = torch.nn.Linear(_WIDTH, _IMAGE_VOCABULARY)

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Return logits for each token of the image."""
        values = torch.cat([self.text(text), self.image(image)], dim=1) + self.positions
        for index, layer in enumerate(self.layers):
            values = layer(values, _attention_mask(index % 4).to(values.device))
        return self.output(self.norm(values[:, _TEXT:]))


def _attention_mask(kind: int) -> torch.Tensor:
    """Return what each token sees: all before it (0), or of the image only its row (1), column (2) or surroundings (3)."""
    mask = torch.ones(_TEXT + _SIDE**2, _TEXT + _SIDE**2, dtype=torch.bool).tril_()
    places = torch.arange(_SIDE**2)
    rows, columns = places // _SIDE, places % _SIDE
    if kind == 1:
        mask[_TEXT:, _TEXT:] &= rows[:, None] == rows
    elif kind == 2:
        mask[_TEXT:, _TEXT:] &= columns[:, None] == columns
    elif kind == 3:
        near = ((rows[:, None] - rows).abs() <= 1) & ((columns[:, None] - columns).abs() <= 1)
        mask[_TEXT:, _TEXT:] &= near
    return mask


def dalle_inference(device: torch.device, batch: int) -> Case:
    """Return `TextToImage` in bf16."""

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "text": torch.randint(_TEXT_VOCABULARY, (batch, _TEXT), device=device, generator=generator),
            "image": torch.randint(_IMAGE_VOCABULARY, (batch, _SIDE**2), device=device, generator=generator),
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(inputs["text"], inputs["image"])

    return Case(TextToImage().eval().to(device, torch.bfloat16), draw, call, precision=torch.bfloat16)
