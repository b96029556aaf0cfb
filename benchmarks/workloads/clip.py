"""A model of the CLIP kind (Radford et al., 2021), whose forward makes the mask of its texts and some indices on the CPU."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Inputs, Model
from benchmarks.workloads.transformer import Layer

_IMAGE = 224
_PATCH = 32
_IMAGE_WIDTH = 768
_TEXT_WIDTH = 512
_TOKENS = 77
_VOCABULARY = 49_408
_SHARED = 512
_LAYERS = 12


class ImageEncoder(torch.nn.Module):
    """Patches and a token for the class; what becomes of that token is the image's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, _IMAGE_WIDTH, _PATCH, stride=_PATCH, bias=False)
        count = (_IMAGE // _PATCH) ** 2 + 1
        self.first = torch.nn.Parameter(torch.randn(1, 1, _IMAGE_WIDTH) / 50)
        self.positions = torch.nn.Parameter(torch.randn(count, _IMAGE_WIDTH) / 50)
        self.layers = torch.nn.ModuleList(Layer(_IMAGE_WIDTH, 12) for _ in range(_LAYERS))
        self.norm = torch.nn.LayerNorm(_IMAGE_WIDTH)
        self.output = torch.nn.Linear(_IMAGE_WIDTH, _SHARED, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return an embedding for each image."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        values = torch.cat([self.first.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for layer in self.layers:
            values = layer(values)
        return self.output(self.norm(values[:, 0]))


class TextEncoder(torch.nn.Module):
    """Tokens of which each sees those before it; what becomes of the largest, the end of the text, is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(_VOCABULARY, _TEXT_WIDTH)
        self.positions = torch.nn.Parameter(torch.randn(_TOKENS, _TEXT_WIDTH) / 50)
        self.layers = torch.nn.ModuleList(Layer(_TEXT_WIDTH, 8) for _ in range(_LAYERS))
        self.norm = torch.nn.LayerNorm(_TEXT_WIDTH)
        self.output = torch.nn.Linear(_TEXT_WIDTH, _SHARED, bias=False)
        # As in CLIP; PyTorch draws embeddings with a standard deviation of 1.
        torch.nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Return an embedding for each text."""
        values = self.tokens(texts) + self.positions
        # As the original does both: a mask at every call, and rows picked by a range on the CPU.
        mask = torch.full((_TOKENS, _TOKENS), float("-inf")).triu_(1).to(values.device, values.dtype)
        for layer in self.layers:
            values = layer(values, mask)
        ends = texts.argmax(dim=-1)
        return self.output(self.norm(values)[torch.arange(len(texts)), ends])


class ImagesAndTexts(torch.nn.Module):
    """How much each image is like each text."""

    def __init__(self) -> None:
        super().__init__()
        self.images = ImageEncoder()
        self.texts = TextEncoder()
        # As CLIP begins: the logarithm of 1 / 0.07.
        self.scale = torch.nn.Parameter(torch.tensor(2.66))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Return a number for each pair."""
        seen = functional.normalize(self.images(images), dim=-1)
        read = functional.normalize(self.texts(texts), dim=-1)
        return self.scale.exp() * seen @ read.T


def clip_inference(device: torch.device, batch: int) -> Case:
    """Return `ImagesAndTexts` of the size of ViT-B/32 in bf16, for as many texts as images."""
    dtype = torch.bfloat16

    def draw(generator: torch.Generator) -> Inputs:
        shape = (batch, 3, _IMAGE, _IMAGE)
        return {
            "images": torch.randn(shape, device=device, dtype=dtype, generator=generator),
            "texts": torch.randint(_VOCABULARY, (batch, _TOKENS), device=device, generator=generator),
        }

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(inputs["images"], inputs["texts"])

    return Case(ImagesAndTexts().eval().to(device, dtype), draw, call, precision=dtype)
