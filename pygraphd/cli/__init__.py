"""The `pygraphd` program: runs one command and turns its error into one line and an exit code. See `commands`.

All imports are within `main`: an interrupt during those before it would end in a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_INTERRUPTED = 130
"""The exit code after SIGINT, as shells have it: 128 and the signal's number."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code; an interrupt that the command does not handle gives 130, and no word."""
    try:
        from pygraphd.cli.output import standard_error

        with standard_error():
            _exit_after(arguments)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _exit_after(arguments: Sequence[str] | None) -> NoReturn:
    from pygraphd.cli.output import NobodyReadsError, complain
    from pygraphd.errors import CommandError, Exit

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
        from pygraphd.cli.run import run_program

        run_program(words[1:])
    from pygraphd.cli.commands import application
    from pygraphd.cli.output import standard_output
    from pygraphd.errors import Exit

    # Files and folders are their owner's to use, whatever else the user keeps from whom.
    os.umask(os.umask(0o077) & 0o077)
    with standard_output():
        application(words, prog_name="pygraphd")
    sys.exit(Exit.OK)
