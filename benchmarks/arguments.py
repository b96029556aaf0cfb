"""Parts of command lines: types of arguments, and how a command ends."""

from __future__ import annotations

import argparse
import signal
import sys

from benchmarks.errors import BenchmarkError


def names(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def run_command(parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """Run the command that the parser finds and return its exit code: 2 for a BenchmarkError, 130 for an interrupt."""
    # A SIGTERM must end the processes and the daemon that the command has started, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parser.parse_args(arguments)
    try:
        return int(options.command(options))
    except BenchmarkError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        # As shells have it: 128, and the number of SIGINT.
        return 130
