"""The commands of `pygraphd cache`: look at entries, explain, delete or derive them anew. None of them starts the daemon."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pygraphd.durations import parse_duration
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.pruning import PruneAnswer, PruneRequest
    from pygraphd.rederiving import RederiveAnswer, RederiveRequest
    from pygraphd.schema.locations import Locations
    from pygraphd.store import Store

_Answer = TypeVar("_Answer")

cache = typer.Typer(
    no_args_is_help=True, help="Look at the cached measurements and decisions, delete some, or decide anew."
)

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Gpu = Annotated[
    str, typer.Option("--gpu", metavar="NAME", help="Only GPUs whose name contains this, in any case.")
]


@cache.command()
def inspect(
    gpu: _Gpu = "",
    graph: Annotated[str, typer.Option("--graph", metavar="PREFIX", help="Only graphs that begin so.")] = "",
    json: _AsJson = False,
) -> None:
    """List the entries, newest first. LAUNCH? marks a decision that was taken before enough calls were seen."""
    from pygraphd import render
    from pygraphd.catalogue import Catalogue

    path = locate().database
    if not path.exists():
        _say(render.entries_json([]) if json else f"no entries: {path} does not exist yet")
        return
    with Catalogue(path) as catalogue:
        entries = catalogue.entries(gpu, graph)
    if json:
        _say(render.entries_json(entries))
    else:
        _say(render.entries_table(entries) if entries else "no entries")


@cache.command()
def show(
    entry: Annotated[
        str, typer.Argument(metavar="ID", help="The first digits of an entry's id, or of its graph.")
    ],
    json: _AsJson = False,
) -> None:
    """Show one entry: its decision, where it was measured, and every measurement kept."""
    from pygraphd import render
    from pygraphd.catalogue import Catalogue

    with Catalogue(locate().database) as catalogue:
        details = catalogue.show(entry)
    _say(render.as_json(details.as_json()) if json else render.entry_text(details))


@cache.command()
def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="GRAPH|SUMMARY",
            help="The first digits of a graph or of an entry's id, or a file written for PYGRAPH_SUMMARY.",
        ),
    ],
    json: _AsJson = False,
) -> None:
    """Say why graphs run as they do: the figures compared, why others lost, what differs where one was not known."""
    from pygraphd import render
    from pygraphd.explain import explain as explain_target
    from pygraphd.render_explanations import answer_text

    answer = explain_target(target, locate())
    _say(render.as_json(answer.as_json()) if json else answer_text(answer))


@cache.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Not used for this long: 30d, 12h.")
    ] = None,
    gpu: _Gpu = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    json: _AsJson = False,
) -> None:
    """Delete entries; at least one of --older-than and --gpu is required."""
    from pygraphd import render
    from pygraphd.pruning import prune_request

    answer = _prune(locate(), prune_request(_age(older_than), gpu, dry_run))
    _say(render.as_json(answer.as_json()) if json else render.prune_text(answer))


@cache.command()
def rederive(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    json: _AsJson = False,
) -> None:
    """Decide anew, with this version's policy, from the measurements that are stored; no GPU is needed."""
    from pygraphd import render
    from pygraphd.rederiving import RederiveRequest

    answer = _rederive(locate(), RederiveRequest(dry_run))
    _say(render.as_json(answer.as_json()) if json else render.rederive_text(answer))


def _age(text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--older-than: {error}") from error


def _prune(locations: Locations, request: PruneRequest) -> PruneAnswer:
    """Have the one writer do it: the daemon, or, while nobody is the daemon, this process."""
    from pygraphd import control

    if control.ping(locations.socket):
        return control.prune(locations.socket, request)
    return _without_daemon(locations, lambda store: store.prune(request), "delete")


def _rederive(locations: Locations, request: RederiveRequest) -> RederiveAnswer:
    from pygraphd import control

    running = control.ping(locations.socket)
    if running is None:
        return _without_daemon(locations, lambda store: store.rederive(request), "derive anew")
    if "rederive" not in running.capabilities:
        raise CommandError(
            f"the daemon is version {running.version}, which cannot derive decisions anew; run: pygraphd restart"
        )
    return control.rederive(locations.socket, request)


def _without_daemon(locations: Locations, task: Callable[[Store], _Answer], what: str) -> _Answer:
    """Be the one writer for one task, under the daemon's lock; raises CommandError."""
    from pygraphd import folders
    from pygraphd.claim import claim, hung_text
    from pygraphd.store import Store, StoreError

    if not locations.database.exists():
        raise CommandError(f"{locations.database}: there is no cache yet, so there is nothing to {what}")
    os.umask(0o077)
    folders.prepare_runtime(locations)
    held = claim(locations, timeout_s=1.0)
    if held is None:
        raise CommandError(hung_text(locations))
    try:
        with held, Store(locations.database) as store:
            return task(store)
    except StoreError as error:
        raise CommandError(str(error)) from error


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
