"""A call that is being recorded, and what it is captured on in the place of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pygraphd.client import verification
from pygraphd.client.donation import NONE, Donation
from pygraphd.client.misfits import Leeway
from pygraphd.client.recording import Moving


@dataclass(frozen=True, slots=True)
class Stood:
    """What a call is captured on: tensors that stand in for its inputs, their memory, and both these and the buffers of `staged` ones."""

    stand_ins: list[Any]
    places: list[torch.Tensor]
    bound: list[Any]

    def with_donated(self, donated: Mapping[int, torch.Tensor]) -> Stood:
        """Return the same with what the capture has made for these inputs."""
        bound = [donated.get(index, value) for index, value in enumerate(self.bound)]
        return dataclasses.replace(self, bound=bound)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is recorded: its inputs, their groups, the buffers of `staged` ones, and what is to be allowed for."""

    inputs: list[Any]
    staged: Mapping[int, torch.Tensor]
    leeway: Leeway
    moving: Moving

    @property
    def is_plain(self) -> bool:
        """Whether its inputs are taken as they are."""
        return not self.staged and self.leeway == Leeway()

    def stood(self, donation: Donation = NONE, *, together: bool = False) -> Stood:
        """Return what stands in for the inputs but for those of a donation, side by side in one allocation if they are to be `together`."""
        make = verification.elsewhere_for if together else verification.stand_ins_for
        stand_ins, places = make(self.inputs, self.leeway, self._moving_without(donation))
        bound = [self.staged.get(index, value) for index, value in enumerate(stand_ins)]
        return Stood(stand_ins, places, bound)

    def bytes_to_stand_in(self, donation: Donation) -> int:
        """Return how much memory that takes, with what is allocated for the donation."""
        rest = verification.bytes_to_stand_in(self.inputs, self.leeway, self._moving_without(donation))
        return rest + donation.bytes

    def _moving_without(self, donation: Donation) -> Moving:
        donated = donation.members  # one that is donated shares memory with no other
        return (
            [each for each in self.moving if each[0].members[0][0] not in donated] if donated else self.moving
        )
