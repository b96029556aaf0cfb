"""Compiles `helper.c` once for each user, Python and content of its sources, and loads it. Needs no torch.

The compiler is the one that Triton uses, so every user of Inductor's kernels has it, and Python's headers. No call waits for it: until
it has finished, nothing is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import secrets
import shlex
import shutil
import stat
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pygraphd.schema.ownership import refuse_planted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

SOURCE = Path(__file__).with_name("helper.c")
PARTS = tuple(SOURCE.with_name(name) for name in ("fused_replay.h", "exec_table.h", "capture_arena.h"))
_NAME = "helper"
_COMPILERS = ("gcc", "clang", "cc")
_SPAWN_S = 5.0
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OWN_FOLDERS = 3
"""Folders above a compiled file that are made here: see `_folders`."""
_UNMAPPED = 65534
"""The owner, in a container without root, of the folders that are root's outside."""

# A shell that ends at once, so that the compiler is nobody's child and a user's os.wait() never meets it.
_SCRIPT = (
    'umask 077; to=$1 part=$2; shift 2; ( if "$@" -o "$part" >"$part.log" 2>&1 </dev/null;'
    ' then rm -f "$part.log"; mv -f "$part" "$to"; else mv -f "$part.log" "$to.log"; fi ) &'
)
_TRY_AGAIN_S = 86_400.0
"""Seconds after which a failed compilation is tried again: a disk may have been full."""


def place(cache: Path) -> Path:
    """Return the path, in a cache folder, of the compiled file of this user, Python and source."""
    content = hashlib.sha256(b"".join(each.read_bytes() for each in (SOURCE, *PARTS))).hexdigest()[:16]
    return (
        cache / "compiled" / str(os.geteuid()) / f"{_NAME}-{content}.{sysconfig.get_config_var('SOABI')}.so"
    )


def compile_once(
    path: Path, environ: Mapping[str, str] | None = None, *, may_compile: bool = True
) -> str | None:
    """Start the compiler unless the file exists; return why it cannot be compiled, or None. Raises OSError."""
    if path.exists():
        return None
    if not may_compile:
        return f"{path} is not there, and this process may not write it"
    log = _log(path)
    if log.exists() and time.time() - log.stat().st_mtime < _TRY_AGAIN_S:
        return why_it_failed(path)
    log.unlink(missing_ok=True)  # it would say that this one has failed
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python has no GIL, and the helper relies on it"
    environ = os.environ if environ is None else environ
    compiler = _compiler(environ)
    if compiler is None:
        return f"no C compiler: none of {', '.join(_COMPILERS)} is there, and CC is not set"
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        return f"no Python.h in {include}: install the headers of this Python"
    refuse_planted(_folders(path)[0])
    for folder in _folders(path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # each: the mode is that of the last one only
    part = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
    command = [*compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(SOURCE)]
    _spawn(["/bin/sh", "-c", _SCRIPT, "sh", str(path), str(part), *command])
    return None


def why_it_failed(path: Path) -> str | None:
    """Return why there will be no compiled file; None if the compiler has not failed, or cannot be known to have."""
    log = _log(path)
    with contextlib.suppress(OSError):  # of a folder that may not be searched
        if log.exists():
            return (
                f"it could not be compiled; {log} says why, and once that file is deleted it is tried again"
            )
    return None


def _log(path: Path) -> Path:
    """Return the path of the file that holds the messages of a failed compilation."""
    return path.with_name(path.name + ".log")


def _folders(path: Path) -> tuple[Path, Path, Path]:
    """Return the folders above a compiled file: the cache, the folder of all compiled files, and that of this user."""
    return path.parents[2], path.parents[1], path.parents[0]


def load(path: Path) -> ModuleType | str | None:
    """Return the compiled module, None if it is not there yet, or why it is not used."""
    try:
        with contextlib.ExitStack() as opened:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            opened.callback(os.close, descriptor)
            if reason := _not_ours(descriptor):
                return reason
            module = _import(descriptor)
            opened.pop_all()  # the system's loader would take another file of this number for the same one
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever happens is a reason to do without
        return f"{path} cannot be loaded: {error}"
    return module


def _import(descriptor: int) -> ModuleType:
    # By the descriptor that was checked: another file may lie at its path by now.
    loader = importlib.machinery.ExtensionFileLoader(_NAME, f"/proc/self/fd/{descriptor}")
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _not_ours(descriptor: int) -> str | None:
    """Return why an open file must not be loaded: another user may have put it there. None if no other user can have."""
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    below, ours = os.fstat(descriptor), {0, os.geteuid()}
    if below.st_uid not in ours or below.st_mode & _OTHERS or not stat.S_ISREG(below.st_mode):
        return f"{path} can be written by others"
    for depth, folder in enumerate(path.parents):
        status, is_above = folder.stat(), depth >= _OWN_FOLDERS
        # Above our own folders, others may have files beside ours, but only where the folder is sticky.
        is_safe = is_above and status.st_mode & stat.S_ISVTX and below.st_uid in ours
        if status.st_uid not in {*ours, _UNMAPPED if is_above else 0} or (
            status.st_mode & _OTHERS and not is_safe
        ):
            return f"{folder} can be written by others"
        below = status
    return None


def _compiler(environ: Mapping[str, str]) -> list[str] | None:
    if chosen := shlex.split(environ.get("CC", "")):
        return chosen if shutil.which(chosen[0]) else None
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return [found] if found else None


def _spawn(command: list[str]) -> None:
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
        timeout=_SPAWN_S,
    )
