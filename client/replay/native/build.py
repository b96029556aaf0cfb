"""Compiles `helper.c` once for each user, Python and content of its sources, and loads it. Needs no torch.

The compiler is the one that Triton uses, so every user of Inductor's kernels has it, and Python's headers. It takes 0.4 to 1 s.
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
import signal
import stat
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pygraphd.client.common.signals import raised_by_handler
from pygraphd.schema.ownership import refuse_planted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

SOURCE = Path(__file__).with_name("helper.c")
PARTS = tuple(SOURCE.with_name(name) for name in ("fused_replay.h", "exec_table.h", "capture_arena.h"))
_NAME = "helper"
_COMPILERS = ("gcc", "clang", "cc")
_TIMEOUT_S = 30.0
"""Seconds after which the compiler is given up, in each process: Triton, which needs it as well, waits for it without end."""
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OWN_FOLDERS = 3
"""Folders above a compiled file that are made here: see `_folders`."""
_UNMAPPED = 65534
"""The owner, in a container without root, of the folders that are root's outside."""


def place(cache: Path) -> Path:
    """Return the path, in a cache folder, of the compiled file of this user, Python and source."""
    content = hashlib.sha256(b"".join(each.read_bytes() for each in (SOURCE, *PARTS))).hexdigest()[:16]
    return (
        cache / "compiled" / str(os.geteuid()) / f"{_NAME}-{content}.{sysconfig.get_config_var('SOABI')}.so"
    )


def compile_once(
    path: Path, environ: Mapping[str, str] | None = None, *, may_compile: bool = True
) -> str | None:
    """Compile the file unless it exists; return why it cannot be compiled, or None. Raises OSError."""
    if path.exists():
        return None
    if not may_compile:
        return f"{path} is not there, and this process may not write it"
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
    return _compile([*compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(SOURCE)], path)


def _compile(command: Sequence[str], path: Path) -> str | None:
    # Other processes may be at it as well. Each has a file of its own, and the last one's stays.
    part = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
    try:
        with tempfile.TemporaryFile() as messages:
            status = _run([*command, "-o", str(part)], messages)
            messages.seek(0)
            # The status is lost, and 0, where the program waits for all children, in a thread or a handler of signals.
            if status or not part.exists():
                return f"{command[0]} failed: {_gist(messages.read())}"
        part.chmod(0o700)  # whatever the umask: see `_not_ours`
        part.replace(path)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {_TIMEOUT_S:g} s"
    finally:
        part.unlink(missing_ok=True)
    return None


def _run(command: Sequence[str], messages: IO[bytes]) -> int:
    # In a session of its own: Ctrl-C is for the program, which may go on after it.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, start_new_session=True
    )
    try:
        return process.wait(_TIMEOUT_S)
    except BaseException:
        # With the programs that it has started, or its linker would go on to write.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _gist(messages: bytes) -> str:
    """Return the line of a compiler's messages that says the most."""
    lines = [line.strip() for line in messages.decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")[:200]


def _folders(path: Path) -> tuple[Path, Path, Path]:
    """Return the folders above a compiled file: the cache, the folder of all compiled files, and that of this user."""
    return path.parents[2], path.parents[1], path.parents[0]


def load(path: Path) -> ModuleType | str:
    """Return the compiled module, or why it is not used."""
    try:
        with contextlib.ExitStack() as opened:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            opened.callback(os.close, descriptor)
            if reason := _not_ours(descriptor):
                return reason
            module = _import(descriptor)
            opened.pop_all()  # the system's loader would take another file of this number for the same one
    except Exception as error:  # whatever happens is a reason to do without
        if raised_by_handler(error):
            raise  # the program's own
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
