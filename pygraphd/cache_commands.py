"""The commands of `pygraphd cache`: look at entries, explain, delete, derive anew, carry elsewhere. None of them starts the daemon."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pygraphd.durations import parse_duration
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.exchange import ImportAnswer, ImportRequest, Portable
    from pygraphd.pruning import PruneAnswer, PruneRequest
    from pygraphd.rederiving import RederiveAnswer, RederiveRequest
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import Ping
    from pygraphd.store import Store

_Answer = TypeVar("_Answer")

cache = typer.Typer(
    no_args_is_help=True,
    help="Look at the cached measurements and decisions, delete some, decide anew, or carry them elsewhere.",
)

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Gpu = Annotated[
    str, typer.Option("--gpu", metavar="NAME", help="Only GPUs whose name contains this, in any case.")
]
_Graph = Annotated[str, typer.Option("--graph", metavar="PREFIX", help="Only graphs that begin so.")]


@cache.command()
def inspect(
    gpu: _Gpu = "",
    graph: _Graph = "",
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


@cache.command()
def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A new file; -: standard output.")],
    gpu: _Gpu = "",
    graph: _Graph = "",
) -> None:
    """Write what is known to a file, for `cache import` on another machine or in an image. Decisions that are not final stay."""
    from pygraphd import exporting, render, spool
    from pygraphd.catalogue import Catalogue

    locations = locate()
    with Catalogue(locations.database) as catalogue:
        found = exporting.export(catalogue, gpu, graph)
    if file == "-":
        _write_out(found.entries)
    else:
        _write_new(Path(file), found.entries)
    # Not into what may be the file itself.
    sys.stderr.write(f"{render.export_text(found, spool.state(locations.spool).waiting)}\n")


@cache.command("import")
def import_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="What `cache export` has written; -: standard input.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be stored.")] = False,
    json: _AsJson = False,
) -> None:
    """Store what another cache has exported, but nothing in the place of what is known here; all or nothing of a bad file."""
    from pygraphd import exchange, render

    answer = exchange.ImportAnswer(dry_run=dry_run)
    for request in exchange.requests(_read(file), dry_run=dry_run):
        answer += _import(locate(), request)
    _say(render.as_json(answer.as_json()) if json else render.import_text(answer))


def _write_out(entries: Sequence[Portable]) -> None:
    from pygraphd import exchange

    try:
        exchange.write(entries, sys.stdout)
        sys.stdout.flush()
    except OSError as error:
        # What is left in its buffer would fail once more when Python ends, with code 120 and a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CommandError(f"standard output: cannot be written: {error.strerror}") from error


def _write_new(path: Path, entries: Sequence[Portable]) -> None:
    from pygraphd import exchange

    try:
        with path.open("x", encoding="utf-8") as stream:
            try:
                exchange.write(entries, stream)
                stream.flush()
            except OSError:
                # Half a file is refused where it is read, but had better not be there.
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
    except FileExistsError as error:
        raise UsageError(f"{path}: exists already; give another name, or delete it first") from error
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from error


def _read(file: str) -> list[Portable]:
    from pygraphd import exchange

    if file == "-":
        return exchange.read_all(sys.stdin.buffer, "standard input")
    try:
        with Path(file).open("rb") as stream:
            return exchange.read_all(stream, file)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error


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
    _check_capability(running, "rederive", "derive decisions anew")
    return control.rederive(locations.socket, request)


def _import(locations: Locations, request: ImportRequest) -> ImportAnswer:
    from pygraphd import control, folders

    running = control.ping(locations.socket)
    if running is None:
        if (problem := folders.prepare_cache(locations)) is not None:
            raise CommandError(problem)
        return _as_the_writer(locations, lambda store: store.add_imported(request, os.geteuid()))
    _check_capability(running, "import", "import")
    return control.add_imported(locations.socket, request)


def _check_capability(running: Ping, capability: str, what: str) -> None:
    if capability not in running.capabilities:
        raise CommandError(
            f"the daemon is version {running.version}, which cannot {what}; run: pygraphd restart"
        )


def _without_daemon(locations: Locations, task: Callable[[Store], _Answer], what: str) -> _Answer:
    """Be the one writer of a cache that there is; raises CommandError."""
    if not locations.database.exists():
        raise CommandError(f"{locations.database}: there is no cache yet, so there is nothing to {what}")
    return _as_the_writer(locations, task)


def _as_the_writer(locations: Locations, task: Callable[[Store], _Answer]) -> _Answer:
    """Be the one writer for one task, under the daemon's lock; raises CommandError."""
    from pygraphd import folders
    from pygraphd.claim import claim, hung_text
    from pygraphd.store import Store, StoreError

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
