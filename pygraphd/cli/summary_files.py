"""Where summaries are kept, and which of them a word names: a file, the pid of a process, a script, or "last"."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from pygraphd import folders
from pygraphd.cli import summaries
from pygraphd.cli.output import complain
from pygraphd.errors import CommandError, UsageError
from pygraphd.remedies import unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pygraphd.schema.locations import Locations

SUMMARY_VARIABLE = "PYGRAPH_SUMMARY"
LAST = "last"
_READONLY = "PYGRAPH_READONLY"
_ON = frozenset({"1", "on", "true", "yes"})
"""The values by which a program takes `PYGRAPH_READONLY` as set; to import what reads them there would import torch, too."""
MAX_SUMMARIES = 64
"""Summaries of `pygraphd run` that are kept; the oldest ones go first."""
# DOTALL, as the name of a file may hold line breaks.
_KEPT = re.compile(r"\d+\.(?P<place>[0-9a-f]{8})\.(?P<name>.+)\.json(?:\.\w+)?", re.DOTALL)
"""The name of a summary of `pygraphd run`: pid, place and name of the program, and for processes that it has started their rank or pid."""


def folder(locations: Locations) -> Path:
    """Return the folder of the summaries that `pygraphd run` asks for."""
    return locations.cache / "summaries"


def variable_for(program: str, locations: Locations, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that has this process leave its summary where `find` looks; empty if it is set, or not to be had.

    `program` is the path of a script, or the name of a module. Why there will be no summary is said on standard error.
    """
    if SUMMARY_VARIABLE in environ:
        return {}
    # A read-only deployment adds nothing to the cache's folder.
    if (readonly := environ.get(_READONLY, "")).strip().lower() in _ON:
        return _without_summary(f"{_READONLY}={readonly}")
    kept = folder(locations)
    try:
        folders.make_private(locations.cache)
        folders.make_private(kept)
        # One less than are kept, for that of this process.
        for old in _newest_first(kept.iterdir())[MAX_SUMMARIES - 1 :]:
            # Another `pygraphd run` may have deleted it by now.
            old.unlink(missing_ok=True)
    except OSError as error:
        return _without_summary(unreadable(kept, error))
    except CommandError as error:
        return _without_summary(str(error))
    return {SUMMARY_VARIABLE: str(kept / f"{os.getpid()}.{'.'.join(_mark_of(program))}.json")}


def _without_summary(why: str) -> dict[str, str]:
    """Say why a program will leave no summary; return no variable, as the program runs all the same."""
    complain(
        f"pygraphd: run: no summary is kept for `pygraphd report`: {why}; to have one, set {SUMMARY_VARIABLE}=FILE"
    )
    return {}


def _mark_of(program: str) -> tuple[str, str]:
    """Return what the names of a program's summaries have of it: a digest of its place and its name, as scripts of one name lie in many folders."""
    place = os.path.realpath(program)  # `Path.resolve` raises for a link to itself
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:8], Path(program).name or Path(place).name


def find(target: str, locations: Locations, environ: Mapping[str, str]) -> Path:
    """Return the summary that `target` names: a file, a pid, or `LAST`; raises UsageError.

    Raises CommandError if another user may have put something where summaries are kept.
    """
    if not target:
        raise UsageError(f"the name of the summary is empty; give a file, a pid or {LAST!r}")
    if target != LAST and summaries.is_file(target):
        return Path(target)
    found = _newest_first(_known(locations, environ))
    if target == LAST:
        if found:
            return found[0]
        raise UsageError(f"there is no summary yet: {summaries.HOW}")
    # PID.PLACE.NAME.json of the process itself, or FILE.PID of one that it has started.
    named = [path for path in found if target.isdecimal() and target in _ends(path.name)]
    if named:
        return named[0]
    summaries.check_absent(target)
    what = "process with this pid left a summary" if target.isdecimal() else "such file"
    raise UsageError(f"{target}: no {what}; {summaries.HOW}")


def _ends(name: str) -> tuple[str, str]:
    return name.partition(".")[0], name.rpartition(".")[2]


def of_program(program: str, locations: Locations, environ: Mapping[str, str]) -> Path | None:
    """Return the newest summary that a script or module has left, of this path if there is one, else of this name; None if there is none.

    Raises CommandError if another user may have put something where summaries are kept.
    """
    place, name = _mark_of(program)
    named = {path: found for path in _known(locations, environ) if (found := _KEPT.fullmatch(path.name))}
    same = [path for path, found in named.items() if found["name"] == name]
    here = [path for path in same if named[path]["place"] == place]
    return next(iter(_newest_first(here or same)), None)


def _known(locations: Locations, environ: Mapping[str, str]) -> list[Path]:
    """Return the summaries that are kept, and those that PYGRAPH_SUMMARY names here, those of ranks and children included.

    Raises CommandError if another user may have put something where they are kept.
    """
    for place in (locations.cache, folder(locations)):
        folders.check_unshared(place)
    found = _files(folder(locations), "")
    if wanted := environ.get(SUMMARY_VARIABLE):
        found += _files(Path(wanted).parent, Path(wanted).name)
    return found


def _files(place: Path, prefix: str) -> list[Path]:
    try:
        return [path for path in place.iterdir() if path.name.startswith(prefix) and _is_ours(path)]
    except OSError:
        return []


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        # PYGRAPH_SUMMARY may name a folder such as /tmp, where others can put files of the same names.
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid in {0, os.geteuid()}
    return False


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    times = {}
    for path in paths:
        with contextlib.suppress(OSError):  # another command may have deleted it
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: -times[path])
