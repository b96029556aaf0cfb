"""Which forwards wait for their backward: what they have saved belongs to the deployment that they ran in. Knows nothing of torch.

Not each forward has one: a call ends in an error, somebody evaluates without `no_grad`, a checkpoint calls the forward once more. Whoever
still waits when the backward has come in some later rounds has none; and where that happens again and again, nobody is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pygraphd.schema.messages import Kind

if TYPE_CHECKING:
    from pygraphd.client.rota import Member

LOST = 3
"""Rounds in which the backward of a family has come after a forward that is given up,"""
MANY = 3
"""and times that this happens, until none of its forwards is waited for any more."""


@dataclass(slots=True)
class _Family:
    """The forwards that wait, each with how many rounds its backward had come in by then."""

    waiting: list[int] = field(default_factory=list)
    rounds: int = 0
    latest: int = -1
    lost: int = 0

    @property
    def is_tied(self) -> bool:
        """Whether its forwards have backwards, by and large."""
        return self.lost < MANY

    def forward(self) -> None:
        if self.is_tied:
            self.waiting.append(self.rounds)

    def backward(self, round_: int) -> None:
        self.rounds += round_ != self.latest
        self.latest = round_
        if self.waiting:
            self.waiting.pop()
        left = [each for each in self.waiting if self.rounds - each < LOST]
        self.lost += len(left) < len(self.waiting)
        self.waiting = left if self.is_tied else []


class OpenForwards:
    """The forwards whose backward is still to come, of families whose backward is measured, too."""

    def __init__(self) -> None:
        self._families: dict[int, _Family] = {}

    def follow(self, member: Member, round_: int) -> None:
        """Note the call of a region."""
        if member.graph.partition != 0:
            return  # a forward may have more parts than its backward
        if member.graph.kind is Kind.BACKWARD:
            self._families.setdefault(member.family, _Family()).backward(round_)
        elif member.graph.kind is Kind.FORWARD and member.family in self._families:
            self._families[member.family].forward()

    def is_tied(self, family: int) -> bool:
        """Whether it is known when the backward of a family has come."""
        return family in self._families and self._families[family].is_tied

    def forget(self, family: int) -> None:
        """Wait no more for a family, of which something is decided."""
        self._families.pop(family, None)

    def give_up(self) -> None:
        """Wait for none of those that are open."""
        for family in self._families.values():
            family.waiting.clear()

    @property
    def are_none(self) -> bool:
        """Whether no forward is open."""
        return not any(family.waiting for family in self._families.values())
