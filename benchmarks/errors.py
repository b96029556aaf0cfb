"""Errors that the user can mend: shown as one line, without a traceback."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A benchmark cannot be run as asked; the text says why and what to do next."""


class UnknownNameError(BenchmarkError):
    """A workload or variant that does not exist."""

    def __init__(self, kind: str, names: list[str], known: list[str]) -> None:
        super().__init__(f"unknown {kind} {', '.join(names)}; choose among: {', '.join(known)}")
