"""The command line of the loads: progress to stderr, results to stdout and to the file that --out names."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.arguments import positive, run_command
from tools.load import large_commands, redis, soak


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all went well, 1 if a bound was broken, 2 if it could not be run as asked."""
    return run_command(parser(), arguments)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    made = argparse.ArgumentParser(prog="python -m tools.load", description=__doc__, allow_abbrev=False)
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    _add_soak(commands.add_parser("soak", help="hold a daemon to bounds under a long mixed load"))
    _add_large(commands.add_parser("large", help="time listings and a prune of a large cache"))
    _add_redis(commands.add_parser("redis", help="lookups and records a second beside Redis"))
    _add_team(
        commands.add_parser("team", help="have many daemons share decisions through one PostgreSQL server")
    )
    for command in commands.choices.values():
        command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the result file (JSON)")
    return made


def _add_soak(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_soak)
    command.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    command.add_argument("--clients", type=positive, default=64, help="at any time (default 64)")
    command.add_argument("--rate", type=positive, default=150, help="requests a second of all (default 150)")


def _add_large(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_large)
    command.add_argument("--entries", type=positive, default=1_000_000, help="in the cache (default 1000000)")


def _add_redis(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_redis)
    command.add_argument("--clients", type=positive, default=8, help="at a time (default 8)")
    command.add_argument("--seconds", type=positive, default=5, help="of each turn (default 5)")
    command.add_argument("--rounds", type=positive, default=3, help="turns of each (default 3)")


def _add_team(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_team)
    command.add_argument(
        "--url",
        required=True,
        help="an empty database, as its owner: postgresql+psycopg://ROLE@HOST/DATABASE",
    )
    command.add_argument("--daemons", type=positive, default=64, help="daemon processes (default 64)")
    command.add_argument("--graphs", type=positive, default=200, help="graphs of each (default 200)")


def _soak(options: argparse.Namespace) -> int:
    plan = soak.Plan(options.clients, options.rate, options.minutes * 60)
    lines, is_kept = soak.measure_soak(plan, options.out.absolute())
    print("\n".join(lines))
    return 0 if is_kept else 1


def _large(options: argparse.Namespace) -> int:
    print("\n".join(large_commands.measure_commands(options.entries, options.out.absolute())))
    return 0


def _redis(options: argparse.Namespace) -> int:
    plan = redis.Plan(options.clients, options.seconds, options.rounds)
    print("\n".join(redis.measure_beside_redis(plan, options.out.absolute())))
    return 0


def _team(options: argparse.Namespace) -> int:
    # Imported here: the other loads need no psycopg.
    from tools.load import team

    plan = team.Plan(options.daemons, options.graphs, options.url)
    print("\n".join(team.measure_team(plan, options.out.absolute())))
    return 0
