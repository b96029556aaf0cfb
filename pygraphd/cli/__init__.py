"""The `pygraphd` program: runs one command and turns its error into one line and an exit code. See `commands`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from pygraphd.cli.output import NobodyReadsError, complain, standard_error, standard_output
from pygraphd.errors import CommandError, Exit

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    with standard_error():
        _exit_after(arguments)


def _exit_after(arguments: Sequence[str] | None) -> NoReturn:
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except NobodyReadsError as error:
        sys.exit(error.exit_code)
    except CommandError as error:
        complain(f"pygraphd: {error}")
        sys.exit(error.exit_code)
    except (
        OSError
    ) as error:  # of a file that no command looks after by itself, as in a folder that may not be searched
        name = "" if error.filename is None else f"{error.filename}: "
        complain(f"pygraphd: {name}{error.strerror or error}")
        sys.exit(Exit.ERROR)


def _run(words: list[str]) -> NoReturn:
    if words[:1] == ["run"] and words[1:2] not in (["--help"], ["-h"]):
        # Without typer: its import would delay every script, and no word here is ours to interpret.
        from pygraphd.cli.launch import launch

        launch(words[1:])
    from pygraphd.cli.commands import application

    with standard_output():
        application(words, prog_name="pygraphd")
    sys.exit(Exit.OK)
