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
    """What went wrong and what to do next, in one line. `exit_code` is for the shell."""

    exit_code = Exit.ERROR


class UsageError(CommandError):
    """What the person typed, exported or wrote into the configuration cannot be meant."""

    exit_code = Exit.USAGE


class NotRunningError(CommandError):
    """The command needs a running daemon, and there is none."""

    exit_code = Exit.NOT_RUNNING
