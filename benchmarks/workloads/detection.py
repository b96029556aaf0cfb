"""A detector of the Mask R-CNN kind (He et al., 2017): anchors made on the CPU, and a number of regions that the host reads.

Not torchvision's: which regions its suppression of overlaps keeps depends on rounding, so that no two ways of running it could
be compared. Here a region counts the less the nearer it is to being dropped.

PyTorch 2.11 does not compile anchors in the usual order, a `stack` of places plus the shapes, in modes with CUDA Graphs.
Inductor moves `arange` to the GPU if all that follows can follow it (`ConstructorMoverPass`). Of an operator that takes a list, as
`stack` does, 2.11 takes the result to be on the GPU already. It looks no further, and leaves an addition of a tensor on the GPU to one
on the CPU ("Unhandled FakeTensor Device Propagation for aten.add.Tensor"). 2.13 asks where the result is.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Inputs, Model

_IMAGE = 512
_CHANNELS = 128
_STRIDES = (16, 32)
_SIZES = (32.0, 64.0, 128.0)
_CLASSES = 91
_LEAST_SCORE = 1.5
_BOX, _MASK = 7, 14


class Pyramid(torch.nn.Module):
    """Features of an image at two scales."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128, 256]
        self.fine = torch.nn.Sequential(*(_halve(a, b) for a, b in itertools.pairwise(widths)))
        self.coarse = _halve(256, 256)
        self.sides = torch.nn.ModuleList(torch.nn.Conv2d(256, _CHANNELS, 1) for _ in _STRIDES)

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Return the features, the finer first."""
        fine = self.fine(image)
        coarse = self.coarse(fine)
        above = self.sides[1](coarse)
        return [self.sides[0](fine) + functional.interpolate(above, scale_factor=2.0), above]


def _halve(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(inputs, outputs, 3, stride=2, padding=1),
        torch.nn.GroupNorm(8, outputs),
        torch.nn.ReLU(),
        torch.nn.Conv2d(outputs, outputs, 3, padding=1),
        torch.nn.ReLU(),
    )


class RegionHead(torch.nn.Module):
    """The class and the mask of each region."""

    def __init__(self) -> None:
        super().__init__()
        self.box = torch.nn.Sequential(
            torch.nn.Linear(_CHANNELS * _BOX**2, 512), torch.nn.ReLU(), torch.nn.Linear(512, _CLASSES)
        )
        self.mask = torch.nn.Sequential(
            torch.nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.ConvTranspose2d(_CHANNELS, _CHANNELS, 2, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(_CHANNELS, 1, 1),
        )

    def forward(self, features: torch.Tensor, boxes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the classes and the mask of all regions together, each as much as it weighs."""
        classes = self.box(_pool(features, boxes, _BOX).flatten(1))
        masks = self.mask(_pool(features, boxes, _MASK)).flatten(1).sigmoid()
        return (torch.cat([classes, masks], dim=1) * weights[:, None]).sum(dim=0) / weights.sum()


def _pool(features: torch.Tensor, boxes: torch.Tensor, side: int) -> torch.Tensor:
    """Return (region, channel, row, column): features at a grid of places in each box."""
    places = (torch.arange(side).to(boxes) + 0.5) / side
    left, top, right, bottom = (boxes / (_IMAGE / 2) - 1).unbind(dim=1)
    columns = left[:, None] + (right - left)[:, None] * places
    rows = top[:, None] + (bottom - top)[:, None] * places
    shape = (len(boxes), side, side)
    grid = torch.stack([columns[:, None].expand(shape), rows[:, :, None].expand(shape)], dim=-1)
    found = functional.grid_sample(features, grid.reshape(1, -1, side, 2), align_corners=False)
    return found[0].unflatten(1, (-1, side)).transpose(0, 1)


class Detector(torch.nn.Module):
    """Finds regions in one image, at two scales. The shapes of the anchors stay on the CPU, whatever the model is moved to."""

    def __init__(self) -> None:
        super().__init__()
        self.pyramid = Pyramid()
        self.scores = torch.nn.Conv2d(_CHANNELS, len(_SIZES), 3, padding=1)
        self.moves = torch.nn.Conv2d(_CHANNELS, 4 * len(_SIZES), 3, padding=1)
        self.head = RegionHead()
        sizes = torch.tensor(_SIZES, device="cpu")[:, None]
        # No buffer, which `Module.to` would move to the GPU.
        self.shapes = sizes * torch.tensor([[-0.5, -0.5, 0.5, 0.5]], device="cpu")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the classes and the mask of what is seen at both scales."""
        fine, coarse = self.pyramid(image)
        return self.detect(fine, _STRIDES[0]) + self.detect(coarse, _STRIDES[1])

    def detect(self, features: torch.Tensor, stride: int) -> torch.Tensor:
        """Return the same at one scale; how many regions there are, the host has to read."""
        scores = self.scores(features).permute(0, 2, 3, 1).flatten()
        moves = self.moves(features).permute(0, 2, 3, 1).reshape(-1, 4)
        # With random weights the scores may lie anywhere. Of standardised ones, some and not all are above
        # the threshold.
        scores = (scores - scores.mean()) / scores.std()
        boxes = self.anchors(stride).to(moves) + moves * stride
        kept = (scores > _LEAST_SCORE).nonzero()[:, 0]
        return self.head(features, boxes[kept], scores[kept] - _LEAST_SCORE)

    def anchors(self, stride: int) -> torch.Tensor:
        """Return the boxes around each place of a scale, made on the CPU at every call."""
        centers = (torch.arange(_IMAGE // stride) + 0.5) * stride
        rows, columns = torch.meshgrid(centers, centers, indexing="ij")
        # Each side by itself, and put together at the end: see the beginning of this file.
        middles = (each[:, :, None] for each in (columns, rows, columns, rows))
        sides = [middle + shape for middle, shape in zip(middles, self.shapes.unbind(dim=1), strict=True)]
        return torch.stack(sides, dim=-1).reshape(-1, 4)


def detection_inference(device: torch.device, batch: int) -> Case:
    """Return `Detector` in float32, for one image at a time."""

    def draw(generator: torch.Generator) -> Inputs:
        return {"image": torch.randn(batch, 3, _IMAGE, _IMAGE, device=device, generator=generator)}

    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return model(inputs["image"])

    return Case(Detector().eval().to(device), draw, call, precision=torch.float32)
