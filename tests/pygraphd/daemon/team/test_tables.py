"""What can be said of a team's tables without a server; `tests/team` compares them with the migrations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.script import ScriptDirectory

from pygraphd.daemon.team.migrating import migration_config
from pygraphd.daemon.team.tables import VERSIONS, metadata

COLUMNS = {
    "environment": "id gpu capability sm_count memory_mb mig torch triton cuda driver cudnn publisher",
    "graph": "digest kind partition partitions operators sizes whole publisher",
    "decision": "id environment graph deployment reason detail against against_detail policy final calls uid host measured_at"
    " recording_us version job publisher published_at",
    "measurement": "decision deployment samples median_us mad_us host_us span_us busy host_mad_us span_mad_us publisher",
}


def test_each_revision_has_its_number() -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        scripts = ScriptDirectory.from_config(migration_config(connection))
        revisions = [each.revision for each in scripts.walk_revisions()]
    engine.dispose()
    assert tuple(reversed(revisions)) == VERSIONS


def test_a_change_of_the_local_tables_needs_a_migration_of_the_teams() -> None:
    """The columns come from the local tables: what is added there is asked of servers that do not have it."""
    found = {
        table.name: " ".join(column.name for column in table.columns) for table in metadata.sorted_tables
    }
    assert found == COLUMNS


def test_every_key_has_the_publisher() -> None:
    for table in metadata.sorted_tables:
        assert "publisher" in {column.name for column in table.primary_key}
