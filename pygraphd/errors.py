"""The errors that end a command: one line for the person, and the exit code."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """The exit codes of every command."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_RUNNING = 3


class CommandError(Exception):
    """An error that ends a command: one line that names the fault and the next step. `exit_code` is for the shell."""

    exit_code = Exit.ERROR


class UsageError(CommandError):
    """An argument, variable or setting of the user's is not valid."""

    exit_code = Exit.USAGE


class DatabaseError(CommandError):
    """The database cannot be used as it is; the line says what to do with the file."""

    exit_code = Exit.USAGE


class NotRunningError(CommandError):
    """The command needs a running daemon, and there is none."""

    exit_code = Exit.NOT_RUNNING
