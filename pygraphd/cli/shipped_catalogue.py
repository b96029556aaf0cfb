"""A catalogue of the decisions that the package ships, or of those in the folder that the settings name instead."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from pygraphd.cli.catalogue import Catalogue
from pygraphd.config import shipped_folder
from pygraphd.daemon import queries, tables
from pygraphd.errors import UsageError
from pygraphd.schema import shipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pygraphd.cli.entries import Page


class ShippedCatalogue(Catalogue):
    """The entries of a folder of exports, in a database in memory."""

    is_shipped = True

    def __init__(self, folder: Path) -> None:
        # One connection for all: each further one would see an empty database in memory of its own.
        engine = sa.create_engine("sqlite://", poolclass=StaticPool)
        tables.Base.metadata.create_all(engine)
        with engine.begin() as connection:
            queries.fill(connection, (known.row for known in shipped.load(folder).known.values()), 0)
        self._path = folder
        self._invalid = 0
        self._engine = engine


@contextlib.contextmanager
def open_with_shipped(*databases: tuple[type[Catalogue], Path]) -> Iterator[tuple[Catalogue, ...]]:
    """Open catalogues in their order, and behind them that of the shipped decisions, unless there are none."""
    kinds = list(databases)
    folder = shipped_folder(os.environ)
    if folder is not None and any(folder.glob("*.jsonl")):
        kinds.append((ShippedCatalogue, folder))
    with contextlib.ExitStack() as opened:
        yield tuple(opened.enter_context(kind(path)) for kind, path in kinds)


def check_not_shipped(prefix: str) -> None:
    """Raise UsageError if the id or graph digest of a shipped decision begins with `prefix`."""
    with open_with_shipped() as catalogues:
        if any(each.has(prefix) for each in catalogues):
            folder = shipped_folder(os.environ)
            of = "with the package" if folder == shipped.folder(shipped.PACKAGE) else f"in {folder}"
            raise UsageError(
                f"{prefix}: is shipped {of}, and not deleted; {shipped.VARIABLE}=0 leaves all of these out"
            )


def what_stays() -> str:
    """Return what a command that deletes all adds to its outcome: the shipped decisions are still there; empty if there are none."""
    folder = shipped_folder(os.environ)
    count = len(shipped.load(folder).known) if folder is not None else 0
    decisions = "1 shipped decision stays" if count == 1 else f"{count} shipped decisions stay"
    return f"; {decisions}: {shipped.VARIABLE}=0 leaves them out" if count else ""


def pages_of(catalogues: Sequence[Catalogue], gpu: str, graph: str, most: int | None) -> Iterator[Page]:
    """Yield the pages of one catalogue after the other, `most` entries in all."""
    left = most
    for each in catalogues:
        for page in filter(None, each.pages(gpu, graph, left)):
            yield page
            left = None if left is None else left - len(page)
        if left == 0:
            return
