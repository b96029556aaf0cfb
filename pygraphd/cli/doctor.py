"""The checks of `pygraphd doctor`: driver, torch, helper, daemon, folders, permissions, memory. Each is OK, or says what to do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraphd.cli import status
from pygraphd.cli.doctor_probe import PYTHON
from pygraphd.cli.render import plural, team_text, team_waiting_text
from pygraphd.config import Setting, config_file, survey
from pygraphd.daemon.lock import ELSEWHERE
from pygraphd.schema import ownership

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pygraphd.cli.status import Status
    from pygraphd.schema.locations import Locations

TORCH = ((2, 11), (2, 15))
"""The oldest and the newest version of torch that is supported."""
MIN_GPU_BYTES = 2**30
MIN_DISK_BYTES = 64 * 2**20
MOUNTS = Path("/proc/self/mounts")
_ESCAPED = re.compile(r"\\([0-7]{3})")
"""A space or another separator in a mounted folder's path, as the kernel writes it: \\040."""
_START = "pygraphd start"
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "afs"})


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: its subject, its finding, and the remedy; that is empty if nothing is wrong."""

    name: str
    found: str
    remedy: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether nothing is to be done."""
        return not self.remedy


def checks(locations: Locations, probed: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Return all checks; `probed` has the answers of `doctor_probe.probe`. Starts nothing, makes nothing, raises nothing."""
    return [
        *_probed(probed),
        *_daemon(locations, probed.get("autostart", {})),
        *_folders(locations),
        *_config_folder(locations),
        *_devices(Path("/dev")),
        *_gpu_memory(probed.get("torch", {})),
    ]


def _probed(probed: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    if (python := probed.get(PYTHON)) is not None:
        remedy = f"run `{sys.executable} -c pass` to see why; install PyGraph into an environment of yours if you may not run it"
        yield Check(PYTHON, str(python["error"]), remedy)
        # Without the other stages: a driver that was not asked would look like one that is missing.
        return
    yield _driver(probed.get("driver", {}))
    yield from _torch(probed)
    yield _recording(probed)
    yield _helper(probed.get("helper", {}))


def _driver(found: Mapping[str, Any]) -> Check:
    # Empty where an earlier stage hung, after which none is asked.
    if "error" in found or not found:
        return Check(
            "driver",
            str(found.get("error", "not asked")),
            "install NVIDIA's driver, or start the container with --gpus all; without one every graph runs as KERNELS",
        )
    if found["status"]:
        code = found["status"]
        return Check(
            "driver",
            f"cuInit fails with {code}",
            "nvidia-smi says more; 100: no GPU is visible (CUDA_VISIBLE_DEVICES), 803: reboot after an update",
        )
    return Check("driver", f"up to CUDA {found['cuda']}")


def _torch(probed: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    found = probed.get("torch")
    if found is None:
        return
    if "error" in found:
        yield Check("torch", str(found["error"]), "install torch 2.11 to 2.15 for this Python")
        return
    gpus = ", ".join(found["gpus"]) or "no GPU"
    text = f"{found['version']}, CUDA {found['cuda'] or 'none'}, {gpus}"
    if not found["cuda"]:
        yield Check(
            "torch", text, "this build has no CUDA; install one of https://pytorch.org for your driver"
        )
    elif not found["gpus"]:
        yield Check("torch", text, "torch sees no GPU: the driver may be older than its CUDA")
    elif not TORCH[0] <= _version(found["version"]) <= TORCH[1]:
        yield Check(
            "torch", text, "PyGraph was tested with torch 2.11 to 2.15; other versions may be left alone"
        )
    else:
        yield Check("torch", text)
    hook = probed.get("hook", {})
    missing = hook.get("error") or hook.get("missing")
    if missing:
        yield Check(
            "hook", str(missing), "use torch 2.11 to 2.15; until then PyGraph does nothing in a program"
        )
    elif hook:
        yield Check("hook", "this torch has all private functions that PyGraph uses")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def _recording(probed: Mapping[str, Mapping[str, Any]]) -> Check:
    found, lacks = probed.get("recording"), probed.get("hook", {}).get("relocation")
    if found is None:
        return Check("recording", "not asked, as an earlier stage failed", "fix the earlier check first")
    if reason := lacks or found.get("error"):
        if not probed.get("torch", {}).get("gpus"):
            return Check("recording", str(reason), "without a GPU graphs run as KERNELS")
        return Check(
            "recording", str(reason), "graphs are left to PyTorch until the driver and torch have these"
        )
    return Check("recording", "the driver has the calls that a relocatable graph needs")


def _helper(found: Mapping[str, Any]) -> Check:
    if "error" in found or not found:
        return Check(
            "helper",
            str(found.get("error", "not asked")),
            "fix that first: without it graphs are left to PyTorch",
        )
    if found["state"] == "loaded":
        return Check("helper", f"compiled: {found['path']}")
    if found["state"] == "refused":
        return Check(
            "helper", str(found["why"]), f"delete {found['path']}; the next program compiles it anew"
        )
    if found["why"]:
        remedy = "install gcc or clang, or set CC, and the headers of this Python; Triton needs them, too"
        return Check("helper", str(found["why"]), remedy)
    return Check("helper", "not compiled yet; the first program that records a graph compiles it")


def _daemon(locations: Locations, autostart: Mapping[str, Any]) -> Iterator[Check]:
    # By the same code as `status`, so that both name the same problems.
    state = status.collect(locations)
    for problem in state.problems:
        yield Check("daemon", problem, 'see docs/daemon.md, "When things go wrong"')
    if not state.running:
        yield from _no_daemon(state, autostart)
        return
    entries = "unknown" if state.entries is None else str(state.entries)
    yield Check("daemon", f"{state.version} runs as pid {state.pid}, {entries} entries")
    if (team := state.team) is not None:
        is_well = not (team.problem or team.queue_problem)
        yield Check("team", team_text(team), "" if is_well else 'see docs/daemon.md, "Team"')


def _no_daemon(state: Status, autostart: Mapping[str, Any]) -> Iterator[Check]:
    # Not `load_config`, which reports the first fault alone.
    settings = survey(os.environ, {})
    for fault in settings.faults:
        remedy = 'correct or remove it: see docs/daemon.md, "Settings"'
        yield Check("daemon", f"cannot be started: {fault.text}", remedy)
    # A daemon that hangs, or whose lock cannot be opened, is a problem, so "not running" might not be true beside one.
    is_well = not state.problems
    if state.spool_waiting:
        waiting = f"{plural(state.spool_waiting, 'file waits', 'files wait')} in the spool"
        yield Check("daemon", f"not running; {waiting}" if is_well else waiting, _START)
    # With a fault in the settings, no program could start one either.
    elif is_well and not settings.faults:
        entries = "unknown" if state.entries is None else str(state.entries)
        yield Check("daemon", f"not running, {entries} entries{_who_starts_one(autostart)}")
    if state.team_waiting or state.team_unpublished:
        has_team = isinstance(url := settings.found["team_url"], Setting) and url.value
        yield Check("team", team_waiting_text(state), _START if has_team else "")


def _who_starts_one(autostart: Mapping[str, Any]) -> str:
    if "why_not" not in autostart:
        return ""  # the probe could not tell
    if reason := autostart["why_not"]:
        return f"; no program starts one here ({reason}), `{_START}` does"
    return "; a program starts one when it needs it"


def _folders(locations: Locations) -> Iterator[Check]:
    mounts = _mounts()
    for name, folder in {"runtime": locations.runtime, "cache": locations.cache}.items():
        if name == "cache" and folder == locations.runtime:
            continue  # PYGRAPHD_HOME
        yield from _folder(f"{name} folder", folder, mounts)


def _folder(name: str, folder: Path, mounts: Iterable[tuple[str, str]]) -> Iterator[Check]:
    # A folder that is not there yet will be made in the nearest one that is.
    there = next(each for each in (folder, *folder.parents) if ownership.is_there(each))
    if there == folder and (problem := ownership.why_not_private(folder)) is not None:
        yield Check(name, problem, "fix the problem named; until then programs run without the cache")
    elif not os.access(there, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        found = "its file system is read-only" if is_read_only else "you may not write to it"
        remedy = ELSEWHERE if is_read_only else "chmod u+rwx, or set PYGRAPHD_HOME to another folder"
        yield Check(name, f"{there}: {found}", remedy)
    elif (kind := _kind_of_mount(there, mounts)) in _NETWORK:
        remedy = "SQLite's WAL needs a local disk: set XDG_CACHE_HOME or PYGRAPHD_HOME to a local folder"
        yield Check(name, f"{folder} is on {kind}", remedy)
    elif (free := shutil.disk_usage(there).free) < MIN_DISK_BYTES:
        yield Check(
            name,
            f"{folder}: {free / 2**20:.0f} MiB free",
            "free some: pygraphd cache prune, or others' files",
        )
    else:
        yield Check(
            name, f"{folder}{'' if there == folder else ' will be made'}, {free / 2**30:.1f} GiB free"
        )


def _config_folder(locations: Locations) -> Iterator[Check]:
    """Check the folder of the configuration file, which is only read, unless it is one of the other folders."""
    name, file = "config folder", config_file(os.environ)
    if file is None or (folder := file.parent) in {locations.runtime, locations.cache}:
        return
    if not ownership.is_there(folder):
        yield Check(name, f"there is no {folder}, so there are no settings in a file")
        return
    # A link is followed, as the daemon does: the settings of many users are links to a folder of theirs.
    owners = {ownership.ROOT, os.geteuid()}
    if (problem := ownership.why_not_private(folder.resolve(), owners)) is not None:
        yield Check(name, problem, "as it says: who may write there chooses the daemon's settings")
    elif not os.access(folder, os.R_OK | os.X_OK):
        yield Check(name, f"{folder}: you may not look into it", f"chmod u+rx {folder}")
    else:
        yield Check(name, str(folder))


def _mounts() -> list[tuple[str, str]]:
    """Return folder and kind of each mounted file system."""
    with contextlib.suppress(OSError):
        lines = MOUNTS.read_text(errors="replace").splitlines()
        found = [fields for line in lines if len(fields := line.split()) > 2]
        return [(_ESCAPED.sub(_character, place), kind) for _, place, kind, *_ in found]
    return []


def _character(escaped: re.Match[str]) -> str:
    return chr(int(escaped[1], 8))


def _kind_of_mount(folder: Path, mounts: Iterable[tuple[str, str]]) -> str:
    real = folder.resolve()
    held = [(len(place), kind) for place, kind in mounts if real.is_relative_to(place)]
    # Mounts lie within mounts: the longest path is that of the file system which holds the folder.
    return max(held, default=(0, ""))[1]


def _devices(folder: Path) -> Iterator[Check]:
    found = sorted(folder.glob("nvidia[0-9c]*"))
    closed = [str(path) for path in found if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        names = ", ".join(closed)
        yield Check(
            "permissions", f"{names}: you may not open them", "join the group that `ls -l` shows for them"
        )
    elif found:
        yield Check("permissions", f"{len(found)} device files of NVIDIA's can be opened")


def _gpu_memory(found: Mapping[str, Any]) -> Iterator[Check]:
    for index, (free, total) in enumerate(found.get("memory", ())):
        text = f"GPU {index}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        needs = "a recording needs room beside the model: end other programs, or use smaller batches at first"
        yield Check("memory", text, needs if free < MIN_GPU_BYTES else "")
