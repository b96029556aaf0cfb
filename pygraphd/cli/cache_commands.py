"""The commands of `pygraphd cache`: inspect, show, explain, prune, delete, clear, rederive, export, import. None of them starts the daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pygraphd import folders
from pygraphd.cli.output import complain
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.durations import parse_duration
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pygraphd.daemon.exchange import ImportAnswer
    from pygraphd.daemon.pruning import PruneAnswer, PruneRequest
    from pygraphd.daemon.rederiving import RederiveAnswer, RederiveRequest
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.portable import Portable

cache = typer.Typer(
    no_args_is_help=True,
    help="Look at the cached measurements and decisions, delete some, decide anew, or carry them elsewhere.",
)

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="Only GPUs whose name contains this, in any case.")
]
_Graph = Annotated[str | None, typer.Option("--graph", metavar="PREFIX", help="Only graphs that begin so.")]


@cache.command()
def inspect(
    gpu: _Gpu = None,
    graph: _Graph = None,
    most: Annotated[
        int | None, typer.Option("--most", metavar="N", min=1, help="Only the newest N of these.")
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", "-w", help="One line for each entry, however wide, with its graph.")
    ] = False,
    json: _AsJson = False,
) -> None:
    """List the entries, newest first, and below them those that the package ships. KERNELS? marks a provisional one: too few calls, or too noisy.

    A terminal gets two lines for each entry that fit it, a pipe or file the wide form.
    """
    from pygraphd.cli import render
    from pygraphd.cli.catalogue import Catalogue
    from pygraphd.cli.filters import Filter
    from pygraphd.cli.shipped_catalogue import open_with_shipped, pages_of

    chosen = Filter.given(gpu, graph)
    path = _readable().database
    with open_with_shipped(*([(Catalogue, path)] if path.exists() else [])) as catalogues:
        pages = pages_of(catalogues, chosen.gpu, chosen.graph, most)
        first = next(pages, None)
        # JSON keeps its form without entries, and a filter that matches nothing has an error of its own.
        if not first and not json and not chosen:
            _say("no entries" if catalogues else f"no entries: {path} does not exist yet")
            return
        pages = itertools.chain([first] if first else [], pages)
        if json:
            _say_all(render.entries_json(pages))
        else:
            columns = shutil.get_terminal_size().columns
            narrow = sys.stdout.isatty() and not wide
            _say_all(render.entries_in_lines(pages, columns) if narrow else render.entries_table(pages))
        if chosen and not first:
            # Before the error, which would come first in a file that takes both streams.
            sys.stdout.flush()
            raise chosen.no_match(catalogues)


@cache.command()
def show(
    entry: Annotated[
        str, typer.Argument(metavar="ID", help="The first digits of an entry's id, or of its graph.")
    ],
    json: _AsJson = False,
) -> None:
    """Show one entry: its decision, its environment, and every stored measurement."""
    from pygraphd.cli import render
    from pygraphd.cli.catalogue import Catalogue, check_prefix
    from pygraphd.cli.render_entry import entry_text
    from pygraphd.cli.shipped_catalogue import open_with_shipped

    check_prefix(entry)
    path = _readable().database
    with open_with_shipped(*([(Catalogue, path)] if path.exists() else [])) as found:
        catalogues = found or (Catalogue(path),)
        # The cache's own entry counts before a shipped one of the same key.
        details = next((each for each in catalogues if each.has(entry)), catalogues[0]).show(entry)
    _say(render.as_json(details.as_json()) if json else entry_text(details))


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
    """Explain why graphs run as they do: the reasons, the costs compared, and how the nearest known environment differs."""
    from pygraphd.cli import render
    from pygraphd.cli.explain import explain as explain_target
    from pygraphd.cli.render_explanations import answer_text

    answer = explain_target(target, locate())
    _say(render.as_json(answer.as_json()) if json else answer_text(answer))


@cache.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Not used for this long: 30d, 12h.")
    ] = None,
    gpu: _Gpu = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the entries that would be deleted.")
    ] = False,
    json: _AsJson = False,
) -> None:
    """Delete entries; at least one of --older-than and --gpu is required."""
    from pygraphd.cli import filters, render
    from pygraphd.daemon.pruning import prune_request

    chosen = filters.Filter.given(gpu)
    locations = _readable()
    answer = _prune(locations, prune_request(_age(older_than), chosen.gpu, dry_run))
    _say(render.as_json(answer.as_json()) if json else render.prune_text(answer))
    if chosen and not answer.entries and (problem := filters.no_such_gpu(chosen.gpu, locations.database)):
        # No error: what is to be gone is gone, be it by an earlier prune.
        sys.stdout.flush()
        complain(f"pygraphd: {problem}")


@cache.command()
def delete(
    keys: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="The first digits of entries' ids, or of their graphs."),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the entries that would be deleted.")
    ] = False,
    json: _AsJson = False,
) -> None:
    """Delete the entries named, with their measurements; an ID that names none or several deletes nothing."""
    from pygraphd.cli import render
    from pygraphd.cli.catalogue import check_prefix
    from pygraphd.daemon.pruning import delete_requests

    locations = _readable()
    for key in keys:
        check_prefix(key)
    # All are looked up before the first is deleted: an ID that is unclear deletes nothing.
    answer = _prune(locations, *delete_requests(_ids(locations.database, keys), dry_run))
    _say(render.as_json(answer.as_json()) if json else render.prune_text(answer))


@cache.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the entries that would be deleted.")
    ] = False,
    json: _AsJson = False,
) -> None:
    """Delete all entries and measurements, those that wait in the spool too. Statistics stay: see `stats --zero`."""
    from pygraphd.cli import render
    from pygraphd.cli.shipped_catalogue import what_stays
    from pygraphd.daemon.pruning import PruneAnswer, PruneRequest

    locations = _readable()
    if not _is_there_a_cache(locations):
        nothing = PruneAnswer(0, 0, 0, dry_run)
        _say(render.as_json(nothing.as_json()) if json else f"nothing to delete{what_stays()}")
        return
    # Counted first, so that the question says what would go.
    answer = _prune(locations, PruneRequest(dry_run=True, everything=True))
    if not dry_run:
        if answer.entries and not yes:
            _ask(f"delete {render.pruned_text(answer)}, which is all in {locations.database}")
        answer = _prune(locations, PruneRequest(everything=True))
    _say(render.as_json(answer.as_json()) if json else render.prune_text(answer) + what_stays())


@cache.command()
def rederive(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the changes.")] = False,
    json: _AsJson = False,
) -> None:
    """Derive decisions anew from stored measurements, by the policy of this version; no GPU is needed."""
    from pygraphd.cli import render
    from pygraphd.daemon.rederiving import RederiveRequest

    answer = _rederive(_readable(), RederiveRequest(dry_run))
    _say(render.as_json(answer.as_json()) if json else render.rederive_text(answer))


@cache.command()
def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A new file; -: standard output.")],
    gpu: _Gpu = None,
    graph: _Graph = None,
) -> None:
    """Write final decisions and their measurements to a file, for `cache import` on another machine or in an image."""
    from pygraphd.cli import export_files, exporting, render
    from pygraphd.cli.catalogue import Catalogue
    from pygraphd.cli.filters import Filter
    from pygraphd.daemon import spool

    _check_file(file)
    chosen = Filter.given(gpu, graph)
    locations = _readable()
    with Catalogue(locations.database) as catalogue:
        found = exporting.Export(catalogue, chosen.gpu, chosen.graph)
        if chosen and found.is_empty:
            raise chosen.no_match([catalogue])
        entries = export_files.write_out(found) if file == "-" else export_files.write_new(Path(file), found)
    # Not into what may be the file itself.
    complain(render.export_text(entries, found.left_out, spool.state(locations.spool).waiting))


@cache.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file of `cache export`; -: standard input.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the entries that would be stored.")
    ] = False,
    json: _AsJson = False,
) -> None:
    """Store the entries of an exported file, unless they were decided here; an invalid file stores nothing."""
    from pygraphd.cli import export_files, foreseeing, render
    from pygraphd.daemon import exchange

    _check_file(file)
    with export_files.opened(file) as (stream, name):
        # To its last line, before anything is stored: a file is refused whole.
        contents = exchange.check_file(stream, name)
        read = exchange.read_file(stream, name)
        entries = (entry for entry in read if entry is not None)
        locations = _readable()
        if dry_run:
            answer = foreseeing.add_imported(locations, entries)
        else:
            answer = _import(locations, entries, contents.entries)
    answer = dataclasses.replace(answer, left_out=contents.left_out)
    _say(render.as_json(answer.as_json()) if json else render.import_text(answer))


def _check_file(file: str) -> None:
    """Raise UsageError for an empty name, which `Path` takes for the folder that the command runs in."""
    if not file:
        raise UsageError("FILE is empty; give the name of a file, or - for a pipe")


def _readable() -> Locations:
    """Return the paths; raises CommandError if another user may have put something there."""
    locations = locate()
    folders.check_readable(locations)
    return locations


def _age(text: str | None) -> float | None:
    """Return the seconds of an age; raises UsageError for one that selects all entries, or none."""
    from pygraphd.daemon.pruning import CENTURY_S

    try:
        age_s = None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--older-than: {error}") from error
    if age_s == 0:
        raise UsageError(
            f"--older-than {text}: every entry is older than that; name an age, as 30d, or leave it out and name a GPU."
            " All entries are deleted by: pygraphd cache clear"
        )
    if age_s is not None and age_s > CENTURY_S:
        raise UsageError(f"--older-than {text}: no entry is that old; name an age below a century, as 30d")
    return age_s


def _prune(locations: Locations, *requests: PruneRequest) -> PruneAnswer:
    from pygraphd.cli import foreseeing
    from pygraphd.cli.writing import writing

    # Else a writer would make a database, only to delete nothing from it.
    _check_there_is_a_cache(locations, "delete")
    if all(request.dry_run for request in requests):
        return foreseeing.prune(locations, requests)
    with writing(locations) as writer:
        first, *others = map(writer.prune, requests)
    return sum(others, first)


def _ids(database: Path, keys: Iterable[str]) -> list[str]:
    """Return the ids of the entries named; raises UsageError for a key that names none or several, or one that is shipped."""
    from pygraphd.cli.catalogue import Catalogue
    from pygraphd.cli.shipped_catalogue import check_not_shipped

    with contextlib.ExitStack() as opened:
        own = opened.enter_context(Catalogue(database)) if database.exists() else None
        for key in keys:
            if own is None or not own.has(key):
                check_not_shipped(key)
        # Two prefixes may name one entry.
        return list(dict.fromkeys(map((own or Catalogue(database)).id_of, keys)))


def _ask(question: str) -> None:
    """Go on if a person says yes; raises UsageError where nobody can be asked."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"to {question}, give --yes (or --dry-run to only count)")
    # Standard output is for the answer, which may be JSON.
    sys.stderr.write(f"{question}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CommandError("nothing was deleted")


def _rederive(locations: Locations, request: RederiveRequest) -> RederiveAnswer:
    from pygraphd.cli import foreseeing
    from pygraphd.cli.writing import writing

    _check_there_is_a_cache(locations, "derive anew")
    if request.dry_run:
        return foreseeing.rederive(locations, request)
    with writing(locations) as writer:
        return writer.rederive(request)


def _check_there_is_a_cache(locations: Locations, what: str) -> None:
    if not _is_there_a_cache(locations):
        raise CommandError(f"{locations.database}: there is no cache yet, so there is nothing to {what}")


def _is_there_a_cache(locations: Locations) -> bool:
    from pygraphd.daemon import control, spool

    if locations.database.exists() or spool.is_any_waiting(locations.spool):
        return True
    return control.ping(locations.socket) is not None


def _import(locations: Locations, entries: Iterable[Portable], count: int) -> ImportAnswer:
    from pygraphd.cli.writing import writing
    from pygraphd.daemon.exchange import ImportAnswer
    from pygraphd.schema.portable import requests

    if (problem := folders.prepare_cache(locations)) is not None:
        raise CommandError(problem)
    answer, done = ImportAnswer(), 0
    try:
        with writing(locations) as writer:
            for request in requests(entries):
                answer += writer.add_imported(request)
                done += len(request.entries)
    except CommandError as error:
        so_far = f"; {done} of {count} entries had been gone through: import the file again"
        # Of the same class, which has the exit code.
        raise type(error)(f"{error}{so_far if done else ''}") from error
    return answer


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _say_all(texts: Iterable[str]) -> None:
    """Print texts as they come."""
    for text in texts:
        _say(text)
