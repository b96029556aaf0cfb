"""Where summaries are kept, and which of them a word names: a file, the pid of a process, a script, or "last"."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from pygraphd import folders
from pygraphd.cli import summaries
from pygraphd.errors import CommandError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pygraphd.schema.locations import Locations

SUMMARY_VARIABLE = "PYGRAPH_SUMMARY"
LAST = "last"
MAX_SUMMARIES = 64
"""Summaries of `pygraphd run` that are kept; the oldest ones go first."""


def folder(locations: Locations) -> Path:
    """Return the folder of the summaries that `pygraphd run` asks for."""
    return locations.cache / "summaries"


def variable_for(script: str, locations: Locations, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that has this process, as `script`, leave its summary where `find` looks; empty if it is set, or not to be had."""
    if SUMMARY_VARIABLE in environ or environ.get("PYGRAPH_READONLY", "0") != "0":
        return {}
    kept = folder(locations)
    try:
        folders.make_private(locations.cache)
        folders.make_private(kept)
        for old in _newest_first(kept.iterdir())[MAX_SUMMARIES - 1 :]:
            old.unlink(missing_ok=True)
    except (OSError, CommandError):
        return {}  # the script runs all the same
    return {SUMMARY_VARIABLE: str(kept / f"{os.getpid()}.{_mark_of(script)}")}


def _mark_of(script: str) -> str:
    """Return the end of the name of a script's summaries: scripts of one name lie in many folders."""
    place = hashlib.sha256(os.fsencode(Path(script).resolve())).hexdigest()[:8]
    return f"{place}.{Path(script).name}.json"


def find(target: str, locations: Locations, environ: Mapping[str, str]) -> Path:
    """Return the summary that `target` names: a file, a pid, or `LAST`; raises UsageError.

    Raises CommandError if another user may have put something where summaries are kept.
    """
    if target != LAST and summaries.is_file(target):
        return Path(target)
    found = _newest_first(_known(locations, environ))
    if target == LAST:
        if found:
            return found[0]
        raise UsageError(f"there is no summary yet: {summaries.HOW}")
    # PID.PLACE.SCRIPT.json of the process itself, or FILE.PID of one that it has started.
    named = [path for path in found if target.isdecimal() and target in _ends(path.name)]
    if named:
        return named[0]
    summaries.check_absent(target)
    what = "process with this pid left a summary" if target.isdecimal() else "such file"
    raise UsageError(f"{target}: no {what}; {summaries.HOW}")


def _ends(name: str) -> tuple[str, str]:
    return name.partition(".")[0], name.rpartition(".")[2]


def of_script(script: str, locations: Locations, environ: Mapping[str, str]) -> Path | None:
    """Return the newest summary that a script has left, of this path if there is one, else of this name; None if there is none."""
    known = _newest_first(_known(locations, environ))
    marks = (f".{_mark_of(script)}", f".{Path(script).name}.json")
    return next((path for mark in marks for path in known if mark in path.name), None)


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
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid in {0, os.geteuid()}
    return False


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    times = {}
    for path in paths:
        with contextlib.suppress(OSError):  # another command may have deleted it
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: -times[path])
