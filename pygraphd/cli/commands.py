"""The commands of `pygraphd` and their options. Each gets its answer from one module and prints it.

Modules that only one command needs are imported inside it, so that `start` does not import tables and rich.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pygraphd import folders
from pygraphd.cli import report_commands
from pygraphd.cli.cache_commands import cache
from pygraphd.cli.suggestions import Commands
from pygraphd.cli.team_commands import team
from pygraphd.config import flag, flag_variable, load_config
from pygraphd.errors import Exit, NotRunningError, UsageError
from pygraphd.schema.locations import environ_elsewhere, locate
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pygraphd.config import Config

application = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="CUDA Graphs for torch.compile where they pay off; the daemon and its cache.",
)
application.add_typer(cache, name="cache", cls=Commands)
application.add_typer(team, name="team", cls=Commands)
application.command()(report_commands.report)
application.command()(report_commands.doctor)
config_commands = typer.Typer(no_args_is_help=True, help="The daemon's settings.")
application.add_typer(config_commands, name="config", cls=Commands)

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_IdleExit = Annotated[
    str | None,
    typer.Option("--idle-exit", metavar="TIME", help="End after this long unused: 30m, 2h; 0 never."),
]
_LogLevel = Annotated[
    str | None,
    typer.Option("--log", metavar="LEVEL", help="Least severity of what is logged: debug, info, warning."),
]
_MetricsPort = Annotated[
    str | None,
    typer.Option("--metrics-port", metavar="PORT", help="Serve /metrics on this port of 127.0.0.1."),
]
_TeamUrl = Annotated[
    str | None,
    typer.Option(
        "--team-url",
        metavar="URL",
        help="Share decisions in this PostgreSQL database: postgresql+psycopg://ROLE@HOST/DATABASE.",
    ),
]

# Everybody on this host can read the words of a process, and a URL may have a password.
_HIDDEN = ("team_url",)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"pygraphd {VERSION}\n")
        raise typer.Exit


@application.callback()
def _options(
    version: Annotated[
        # Eager: click would first miss the name of a command.
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that come before any command."""


@application.command()
def start(
    foreground: Annotated[bool, typer.Option("--foreground", help="Do not go into the background.")] = False,
    idle_exit: _IdleExit = None,
    log: _LogLevel = None,
    metrics_port: _MetricsPort = None,
    team_url: _TeamUrl = None,
) -> None:
    """Start the daemon, unless it runs already."""
    flags = {"idle_exit": idle_exit, "log": log, "metrics_port": metrics_port, "team_url": team_url}
    if foreground:
        # The start in the background hands these on as variables.
        flags |= {name: os.environ.get(flag_variable(name)) for name in _HIDDEN if flags[name] is None}
    # The daemon reads them again, from another folder.
    load = functools.partial(load_config, environ_elsewhere(), flags)
    if foreground:
        from pygraphd.daemon.process import run as run_daemon

        raise typer.Exit(run_daemon(locate(), load))
    _start_in_background(flags, load())


@application.command()
def stop() -> None:
    """Stop the daemon and wait until it is gone."""
    from pygraphd.cli import lifecycle

    _say(f"stopped (pid {lifecycle.stop(locate())})")


@application.command()
def restart(
    idle_exit: _IdleExit = None,
    log: _LogLevel = None,
    metrics_port: _MetricsPort = None,
    team_url: _TeamUrl = None,
) -> None:
    """Stop the daemon if it runs, then start it, with the options that it had; options given here override them."""
    from pygraphd.cli import lifecycle
    from pygraphd.cli.output import complain

    given = {"idle_exit": idle_exit, "log": log, "metrics_port": metrics_port, "team_url": team_url}
    locations = locate()
    # Before the stop: a daemon that has ended tells nobody its options.
    had = lifecycle.options_of(locations, [name for name, text in given.items() if text is None])
    flags = given | had.kept
    # Also before it: a setting that is not valid would leave no daemon at all.
    config = load_config(os.environ, flags)
    try:
        lifecycle.stop(locations)
    except NotRunningError:
        _say("was not running")
    for text in had.texts():
        complain(f"pygraphd: {text}")
    _start_in_background(flags, config)


@application.command()
def status(json: _AsJson = False) -> None:
    """Show whether the daemon runs, its files and problems; exit code 3 if it does not run, 2 if a setting keeps it from starting."""
    from pygraphd.cli import render
    from pygraphd.cli.status import collect

    state = collect(locate())
    _say(render.as_json(state.as_json()) if json else render.status_text(state))
    if not state.running:
        # They keep it from being started. Of one that runs, which has read its own, they are among the problems.
        load_config(os.environ, {})
    raise typer.Exit(Exit.OK if state.running else Exit.NOT_RUNNING)


@application.command()
def stats(
    zero: Annotated[bool, typer.Option("--zero", help="Begin to count anew.")] = False,
    json: _AsJson = False,
) -> None:
    """Show hits, misses by reason and the time saved, since the daemon's start and in all."""
    from pygraphd.cli import render
    from pygraphd.cli.stats import begin_anew, collect, statistics_text

    locations = locate()
    if zero:
        begin_anew(locations)
    found = collect(locations)
    _say(render.as_json(found.as_json()) if json else statistics_text(found))


@application.command()
def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with each line that is added, until interrupted.")
    ] = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
) -> None:
    """Print the last lines of the daemon's log."""
    from pygraphd.cli import logs as reading

    locations = locate()
    folders.check_unshared(locations.cache)
    log = locations.log
    reading.check_there(locations)
    try:
        # Each line is flushed: into a pipe, Python would write only when a block is full.
        for line in reading.follow(log, count) if follow else reading.last_lines(log, count):
            _say(line)
            sys.stdout.flush()
    # The way to end `-f`, so no failure.
    except KeyboardInterrupt:
        raise typer.Exit(Exit.OK) from None


@application.command("systemd-units")
def systemd_units(
    unit: Annotated[
        str, typer.Argument(metavar="[socket|service]", help="Only this unit, to be written to a file.")
    ] = "",
) -> None:
    """Print a systemd user service that starts with the first connection to its socket."""
    from pygraphd.cli.systemd import units, units_text

    texts = units(locate(), os.environ)
    if not unit:
        _say(units_text(texts, "~/.config/systemd/user"))
    elif (name := f"pygraphd.{unit}") in texts:
        sys.stdout.write(texts[name])
    else:
        raise UsageError(f"systemd-units: {unit}: expected socket or service")


@config_commands.command("show")
def config_show(json: _AsJson = False) -> None:
    """Show each setting that a daemon started now would have, and where it comes from; exit code 2 if one is not valid."""
    from pygraphd.cli import render
    from pygraphd.cli.output import complain
    from pygraphd.config import config_file, survey

    found = survey(os.environ, {})
    file = config_file(os.environ)
    problems = [fault.text for fault in found.faults]
    if json:
        where = None if file is None else str(file)
        answer = {"schema": 1, "file": where, "settings": found.settings(), "problems": problems}
        _say(render.as_json(answer))
    else:
        _say(render.config_text(found, file))
    # Or what is said on standard error would come first in a pipe or file that takes both.
    sys.stdout.flush()
    for problem in problems:
        complain(f"pygraphd: {problem}")
    raise typer.Exit(Exit.USAGE if problems else Exit.OK)


@application.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] SCRIPT ARGS...",
            help="As after `python`: options, a script or -m MODULE, and its arguments.",
        ),
    ] = None,
) -> None:
    """Run a Python script with PyGraph switched on (PYGRAPH=1); everything after `run` goes to Python."""
    # Only for the help: `main` hands other words of `run` to `run_program` before it imports typer.
    from pygraphd.cli.run import run_program

    run_program(arguments or [])


def _start_in_background(flags: Mapping[str, str | None], config: Config) -> None:
    from pygraphd.cli import lifecycle
    from pygraphd.cli.output import complain

    locations = locate()
    given = {name: text for name, text in flags.items() if text is not None}
    hidden = {name: given.pop(name) for name in _HIDDEN if name in given}
    variables = {flag_variable(name): text for name, text in hidden.items()}
    words = [f"{flag(name)}={text}" for name, text in given.items()]
    running, started = lifecycle.start(locations, words, variables, _say_aside)
    _say(f"{'started' if started else 'already running'} (pid {running.pid})")
    sys.stdout.flush()
    if started:
        for problem in lifecycle.problems(locations):
            complain(f"pygraphd: {problem}")
    elif others := lifecycle.not_applied(locations, config, given, hidden):
        options = " ".join(others)
        complain(
            f"pygraphd: not applied, as the daemon runs already: {options}; run: pygraphd restart {options}"
        )


def _say_aside(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
