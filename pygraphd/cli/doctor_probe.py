"""The stages of `pygraphd doctor` that need torch or the client. They run in a Python of their own: commands import neither, and a driver may hang.

Each stage prints one line of JSON, so that a time limit tells the stage that hung.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_S = 120.0
"""Seconds for all stages; importing torch from a cold network disk takes half a minute."""
STAGES = ("driver", "torch", "hook", "recording", "helper", "autostart")
PYTHON = "python"
"""In place of all stages, if Python cannot be run or ends before the first one."""

_PROBE = """
import ctypes, json, os, tempfile
from pathlib import Path

def stage(name, find):
    print(json.dumps({"begins": name}), flush=True)
    try:
        found = find()
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"stage": name, **found}), flush=True)

def driver():
    cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    status = cuda.cuInit(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return {"status": status, "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}

def gpus():
    import torch
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    return {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": names, "memory": memory}

def hook():
    from pygraphd.client.backend import torch_private
    return {"missing": torch_private.missing(), "relocation": torch_private.missing_for("relocation")}

def recording():
    from pygraphd.client.backend import driver
    driver.load()
    return {}

def helper():
    from pygraphd.client.replay.native import build
    from pygraphd.schema.locations import locate
    path = build.place(locate().cache)
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            return {"path": str(path), "state": "absent", "why": build.compile_once(build.place(Path(folder)))}
    found = build.load(path)
    is_refused = isinstance(found, str)
    return {"path": str(path), "state": "refused" if is_refused else "loaded", "why": found if is_refused else None}

def autostart():
    from pygraphd.client.decisions import daemon_start
    from pygraphd.client.frontend import settings
    name = settings.READONLY
    is_readonly = settings.read(os.environ).readonly
    return {"why_not": f"{name}={os.environ[name]}" if is_readonly else daemon_start.why_not(os.environ)}

stage("autostart", autostart)  # first: no driver hangs there
for name, find in (("driver", driver), ("torch", gpus), ("hook", hook), ("recording", recording), ("helper", helper)):
    stage(name, find)
"""


def probe(environ: Mapping[str, str] | None = None, limit_s: float = PROBE_S) -> dict[str, dict[str, Any]]:
    """Return what each stage found, by name: facts, or an `error`. A stage that hangs has one, and later ones are missing.

    `PYTHON` alone has an error if no stage began.
    """
    environ = os.environ if environ is None else environ
    command = [sys.executable, "-c", _PROBE]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            # With PYGRAPH=1 in the environment, importing torch would switch PyGraph on in the probe.
            env={**environ, "PYGRAPH_DISABLE": "1"},
            # A driver may end the process: what the stages before have said still counts.
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return _read(error.stdout or b"", f"no answer within {limit_s:g} s")
    except OSError as error:
        return {PYTHON: {"error": f"{sys.executable}: cannot be run: {error.strerror}"}}
    return _read(ended.stdout, f"Python ended with code {ended.returncode}")


def _read(output: bytes, otherwise: str) -> dict[str, dict[str, Any]]:
    """Read the lines of a probe; a stage that began and did not end has the error `otherwise`."""
    found: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # torch may print, too
            said = json.loads(line)
            if isinstance(said, dict) and said.get("begins") in STAGES:
                found[said["begins"]] = {"error": otherwise}
            elif isinstance(said, dict) and said.get("stage") in STAGES:
                found[said.pop("stage")] = said
    return found or {PYTHON: {"error": otherwise}}
