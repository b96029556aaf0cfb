"""The filters of `cache inspect` and `cache export`: whether they can match anything, and what to say where they match nothing."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.cli.catalogue import NO_DIGITS, Catalogue, is_prefix
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.checks import InvalidMessageError, check_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_MOST_NAMED = 8
"""GPU models that are named in one line."""
_MAX_GPU_TEXT = 256
"""Characters in the longest name of a GPU that is stored."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects entries whose GPU name contains `gpu`, in any case, and whose graph begins with `graph`; an empty text selects all.

    Raises UsageError for a text that no entry can match.
    """

    gpu: str = ""
    graph: str = ""

    def __post_init__(self) -> None:
        try:
            check_text("--gpu", self.gpu, _MAX_GPU_TEXT)
        except InvalidMessageError as error:
            remedy = "give a part of a name that `pygraphd cache inspect` lists"
            raise UsageError(f"{error}; {remedy}") from error
        if not is_prefix(self.graph):
            raise UsageError(f"--graph {shlex.quote(self.graph)}: {NO_DIGITS}")

    @classmethod
    def given(cls, gpu: str | None, graph: str | None = None) -> Filter:
        """Return the filter of two options, None for one that is not given; raises UsageError, also for an empty text."""
        for name, text in (("--gpu", gpu), ("--graph", graph)):
            # As of a variable of the shell that is not set, and `prune` would delete the entries of all GPUs.
            if text == "":
                raise UsageError(
                    f"{name}: is empty, which would select all entries; give a text, or leave {name} out"
                )
        return cls(gpu or "", graph or "")

    def __bool__(self) -> bool:
        return bool(self.gpu or self.graph)

    def no_match(self, catalogues: Iterable[Catalogue]) -> UsageError:
        """Return the error that no entry of some catalogues matches, with what to try."""
        models = sorted(set().union(*(each.gpus() for each in catalogues)))
        texts = {"--gpu": self.gpu, "--graph": self.graph}
        given = " ".join(f"{name} {shlex.quote(text)}" for name, text in texts.items() if text)
        return UsageError(f"no entry matches {given}; {self._remedy(models)}")

    def _remedy(self, models: Sequence[str]) -> str:
        if not models:
            return "there are no entries yet: a program run by `pygraphd run` makes some"
        if not any(self._has_gpu(model) for model in models):
            return f"there are entries of {_listed(models)}"
        others = f" --gpu {shlex.quote(self.gpu)}" if self.gpu else ""
        return f"give fewer digits, or see: pygraphd cache inspect{others}"

    def _has_gpu(self, model: str) -> bool:
        return self.gpu.lower() in model.lower()


def no_such_gpu(gpu: str, database: Path) -> str:
    """Return that a cache has no entry of a GPU, as text; empty if it has one, or cannot be read."""
    # A hint beside an outcome that stands: a cache that cannot be read does not make it an error.
    with contextlib.suppress(CommandError), Catalogue(database) as catalogue:
        chosen = Filter(gpu)
        if not catalogue.places(chosen.gpu, ""):
            return str(chosen.no_match([catalogue]))
    return ""


def _listed(models: Sequence[str]) -> str:
    more = len(models) - _MOST_NAMED
    return ", ".join(models[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
