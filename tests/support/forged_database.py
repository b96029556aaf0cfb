"""Makes databases whose tables hold anything, as who forges one would."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def copy_without_types(database: Path, target: Path) -> None:
    """Copy the tables without STRICT, constraints and keys."""
    with contextlib.closing(sqlite3.connect(target)) as copy:
        copy.execute("ATTACH ? AS source", (str(database),))
        for (name,) in copy.execute("SELECT name FROM source.sqlite_schema WHERE type = 'table'").fetchall():
            columns = [row[1] for row in copy.execute(f"PRAGMA source.table_info({name})")]
            copy.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            copy.execute(f"INSERT INTO {name} SELECT * FROM source.{name}")
        (version,) = copy.execute("PRAGMA source.user_version").fetchone()
        (program,) = copy.execute("PRAGMA source.application_id").fetchone()
        copy.execute(f"PRAGMA user_version={version}")
        copy.execute(f"PRAGMA application_id={program}")
        copy.commit()
