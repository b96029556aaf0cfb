"""A catalogue of the entries in the spool, which programs without a daemon read as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from pygraphd.cli.catalogue import Catalogue
from pygraphd.daemon import queries, spool, tables
from pygraphd.errors import CommandError

if TYPE_CHECKING:
    from pathlib import Path


class SpoolCatalogue(Catalogue):
    """The entries that the daemon would store from the files, in a database in memory."""

    is_spool = True

    def __init__(self, folder: Path) -> None:
        # One connection for all: each further one would see an empty database in memory of its own.
        engine = sa.create_engine("sqlite://", poolclass=StaticPool)
        tables.Base.metadata.create_all(engine)
        try:
            with engine.begin() as connection:
                for file in spool.waiting(folder):
                    queries.record(connection, file.request, file.uid, file.left_at)
        except sa.exc.DBAPIError as error:
            raise CommandError(
                f"{folder}: cannot be read: {error.orig}; `pygraphd start` takes it in"
            ) from error
        self._path = folder
        self._invalid = 0
        self._engine = engine
