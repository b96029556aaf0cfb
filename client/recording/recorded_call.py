"""A call that is being recorded, and what it is captured on in the place of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pygraphd.client.recording.builder import Moving
from pygraphd.client.recording.layout_mismatch import LayoutConstraints
from pygraphd.client.recording.stand_ins import bytes_to_stand_in, elsewhere_for, stand_ins_for


@dataclass(frozen=True, slots=True)
class Stood:
    """What a call is captured on: tensors that stand in for its inputs, their memory, and both these and the buffers of `staged` ones."""

    stand_ins: list[Any]
    places: list[torch.Tensor]
    bound: list[Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is recorded: its inputs, their groups, the buffers of `staged` ones, and what is to be allowed for."""

    inputs: list[Any]
    staged: Mapping[int, torch.Tensor]
    constraints: LayoutConstraints
    moving: Moving

    def stood(self, *, together: bool = False) -> Stood:
        """Return what stands in for the inputs, side by side in one allocation if they are to be `together`."""
        make = elsewhere_for if together else stand_ins_for
        stand_ins, places = make(self.inputs, self.constraints, self.moving)
        bound = [self.staged.get(index, value) for index, value in enumerate(stand_ins)]
        return Stood(stand_ins, places, bound)

    @property
    def bytes_to_stand_in(self) -> int:
        """How much memory that takes."""
        return bytes_to_stand_in(self.inputs, self.constraints, self.moving)
