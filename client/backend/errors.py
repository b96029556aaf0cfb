"""Exceptions that several rooms raise and catch."""

from __future__ import annotations

import enum


class Misfit(enum.Enum):
    """Why a recording does not fit a call."""

    OVERLAP = "inputs that shared memory when it was recorded lie otherwise"
    ALIGNMENT = "an input is not aligned as it was when it was recorded"


class UnfitError(Exception):
    """A recording does not fit the inputs of one call, which is to be launched; the text is the reason."""

    misfit: Misfit | None = None
    """What another recording would have to allow for, if one could."""


class MisfitError(UnfitError):
    """It does not fit where the inputs lie."""

    def __init__(self, misfit: Misfit) -> None:
        """Say why."""
        super().__init__(misfit.value)
        self.misfit = misfit
