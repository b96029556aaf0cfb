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


def as_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
