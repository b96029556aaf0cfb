"""A random-number generator of which only the state counts."""

from __future__ import annotations


class Generator:
    """A generator of which only the state counts."""

    def __init__(self, seed: int, offset: int) -> None:
        self.seed = seed
        self.offset = offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class Default:
    """A device's default generator, whose state a program may exchange."""

    def __init__(self, state: Generator) -> None:
        self.state = state

    def get_offset(self) -> int:
        return self.state.offset

    def graphsafe_get_state(self) -> Generator:
        return self.state


def as_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
