"""The commands of `pygraphd team`. They talk to the team's database themselves, and need no daemon."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from pygraphd.config import load_config, variable
from pygraphd.errors import UsageError

team = typer.Typer(no_args_is_help=True, help="The PostgreSQL database that a team shares.")


# Without a callback, typer has a group of one command be that command itself.
@team.callback()
def _team() -> None:
    """Keep the name of the one command."""


@team.command()
def init(
    team_url: Annotated[
        str | None,
        typer.Option(
            "--team-url", metavar="URL", help="The database, as its owner; else PYGRAPHD_TEAM_URL names it."
        ),
    ] = None,
    reader: Annotated[
        list[str] | None, typer.Option("--reader", metavar="ROLE", help="Allow this role to read.")
    ] = None,
    publisher: Annotated[
        list[str] | None,
        typer.Option("--publisher", metavar="ROLE", help="Allow this role to read and to publish."),
    ] = None,
) -> None:
    """Make the tables in a team's database, or bring them up to date, and give roles their rights."""
    from pygraphd.daemon.team.migrating import initialise

    url = load_config(os.environ, {"team_url": team_url}).team_url.value
    if not url:
        raise UsageError(f"team init: no database is named: set {variable('team_url')} or give --team-url")
    made = initialise(url, reader or (), publisher or ())
    before = "made" if made.before is None else "were there" if made.before == made.after else "migrated"
    # The text of a `TeamUrl` has no password.
    sys.stdout.write(f"{url}: tables of version {made.after} {before}\n")
