"""Has `bulk.c` compiled once for each user, Python and version of it, and loads it. Knows nothing of torch.

The compiler is the one that Triton finds, so that who runs Inductor's kernels has it, and Python's headers, too. Nobody waits
for it: the process that starts it goes on without, and whoever records a graph later loads what is there by then.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import stat
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

SOURCE = Path(__file__).with_name("bulk.c")
_NAME = "bulk"
_COMPILERS = ("gcc", "clang", "cc")
_SPAWN_S = 5.0

# A shell that ends at once, so that the compiler is nobody's child and a user's os.wait() never meets it.
_SCRIPT = (
    'to=$1; shift; ( if "$@" -o "$to.$$" >"$to.log.$$" 2>&1 </dev/null;'
    ' then mv -f "$to.$$" "$to"; rm -f "$to.log.$$"; else mv -f "$to.log.$$" "$to.log"; fi ) &'
)


def place(cache: Path) -> Path:
    """Return where the compiled file of this user, Python and source belongs in a cache folder."""
    content = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return (
        cache / "compiled" / str(os.geteuid()) / f"{_NAME}-{content}.{sysconfig.get_config_var('SOABI')}.so"
    )


def compile_once(path: Path, environ: Mapping[str, str] | None = None) -> str | None:
    """Start the compiler unless the file is there; return why that is no use, or None. Raises OSError."""
    if path.exists():
        return None
    log = path.with_name(path.name + ".log")
    if log.exists():
        return f"it could not be compiled; {log} says why, and once that file is deleted it is tried again"
    environ = os.environ if environ is None else environ
    compiler = _compiler(environ)
    if compiler is None:
        return f"no C compiler: none of {', '.join(_COMPILERS)} is there, and CC is not set"
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        return f"no Python.h in {include}: install the headers of this Python"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [*compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(SOURCE)]
    _spawn(["/bin/sh", "-c", _SCRIPT, "sh", str(path), *command])
    return None


def load(path: Path) -> ModuleType | str | None:
    """Return the compiled module, None if it is not there yet, or why it is not used."""
    try:
        if reason := _not_ours(path):
            return reason
        loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
        spec = importlib.util.spec_from_loader(_NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except FileNotFoundError:
        return None
    except (OSError, ImportError) as error:
        return f"{path} cannot be loaded: {error}"
    return module


def _not_ours(path: Path) -> str | None:
    """Return why code in this file is not to be run, if another user may have written it."""
    for each in (path, path.parent):
        status = each.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{each} can be written by others"
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
