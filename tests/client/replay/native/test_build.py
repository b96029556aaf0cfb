"""The helper is compiled by whatever C compiler there is, once, for those who come later; who has none is told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from pygraphd.client.replay.native import build

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

WAIT_S = 60.0
TO = 'while [ "$1" != -o ]; do shift; done; to=$2'
"""What a program does to find the file that a compiler is to write."""


def script(path: Path, text: str) -> str:
    """Write a program in place of a compiler; returns its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the helper lies, compiled."""
    path = build.place(tmp_path_factory.mktemp("cache"))
    assert "No such file" in str(build.load(path))
    assert build.compile_once(path) is None
    return path


def test_what_was_compiled_is_loaded_and_not_compiled_again(compiled: Path) -> None:
    assert build.compile_once(compiled, {"CC": "/nowhere/cc"}) is None

    module = build.load(compiled)

    assert isinstance(module, ModuleType)
    assert {"configure", "fill", "plan"} <= set(dir(module))
    assert [each.name for each in compiled.parent.iterdir()] == [compiled.name]


def test_what_is_no_list_of_tensors_is_an_error_and_no_crash(compiled: Path) -> None:
    module = build.load(compiled)
    assert isinstance(module, ModuleType)

    with pytest.raises(TypeError, match="1 lists"):
        module.plan((2,))
    with pytest.raises(TypeError, match="3 lists"):
        module.fill(module.plan([]), (), [], [])
    with pytest.raises(ValueError, match="PyCapsule"):
        module.fill(None, [], [], [])


def test_the_file_is_anothers_for_another_source_or_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.place(tmp_path)
    source = tmp_path / "helper.c"
    source.write_text("/* another */")
    monkeypatch.setattr(build, "SOURCE", source)

    assert build.place(tmp_path) != before
    assert build.place(tmp_path).parent == before.parent == tmp_path / "compiled" / str(os.geteuid())


def test_without_a_compiler_there_is_a_reason(tmp_path: Path) -> None:
    reason = build.compile_once(build.place(tmp_path), {"CC": "/nowhere/cc"})

    assert reason is not None
    assert "no C compiler" in reason
    assert list(tmp_path.iterdir()) == []


def test_without_headers_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})

    assert "install the headers" in str(build.compile_once(build.place(tmp_path / "cache")))


def test_a_compiler_that_fails_is_the_reason_and_is_called_again(tmp_path: Path) -> None:
    path = build.place(tmp_path)
    text = (
        "echo helper.c: in function >&2; echo helper.c:1: error: no space left >&2; echo 1 error >&2; exit 1"
    )
    broken = script(tmp_path / "cc", text)

    assert build.compile_once(path, {"CC": broken}) == f"{broken} failed: helper.c:1: error: no space left"
    assert list(path.parent.iterdir()) == []
    assert build.compile_once(path) is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("echo killed >&2", "killed"), (r"printf '\377' >&2", "\ufffd"),
        (":", "it said nothing"), (f"{TO}; echo half >$to; kill -9 $$", "it said nothing"),
    ],
)  # fmt: skip
def test_whatever_a_compiler_says_there_is_a_reason(tmp_path: Path, said: str, told: str) -> None:
    broken = script(tmp_path / "cc", said)

    assert build.compile_once(build.place(tmp_path), {"CC": broken}) == f"{broken} failed: {told}"


def test_a_compiler_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.place(tmp_path)
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.2)
    hangs = script(tmp_path / "cc", f"{TO}; echo half >$to; exec sleep 60")

    assert build.compile_once(path, {"CC": hangs}) == f"{hangs} did not end within 0.2 s"
    assert list(path.parent.iterdir()) == []


def test_a_compiler_that_is_given_up_takes_along_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its linker would go on to write a file that nobody expects any more."""
    started = tmp_path / "started"
    hangs = script(tmp_path / "cc", f"sleep 600 & echo $! >{started}.part; mv {started}.part {started}; wait")
    wait = subprocess.Popen.wait

    def give_up(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        while not started.exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(hangs, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", give_up)
    assert "did not end within" in str(build.compile_once(build.place(tmp_path), {"CC": hangs}))
    status = Path(f"/proc/{started.read_text().strip()}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":  # until the signal has come
        time.sleep(0.01)


@pytest.mark.filterwarnings(
    "ignore:subprocess .* is still running:ResourceWarning"
)  # Python kills it, and waits later
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_what_interrupts_it_is_the_programs_and_leaves_nothing(
    tmp_path: Path, error: type[BaseException]
) -> None:
    """As Ctrl-C, or the end of a job's time."""
    path = build.place(tmp_path)
    interrupts = script(tmp_path / "cc", f"{TO}; echo half >$to; kill -USR1 {os.getpid()}; exec sleep 60")

    def interrupt(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(error):
            build.compile_once(path, {"CC": interrupts})
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert list(path.parent.iterdir()) == []
    assert build.compile_once(path) is None
    assert isinstance(build.load(path), ModuleType)


REAPS = """
import os, sys, threading, time
from pathlib import Path
from pygraphd.client.replay.native import build

def reap():
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.001)

threading.Thread(target=reap, daemon=True).start()
print(build.compile_once(Path(sys.argv[1])), build.compile_once(Path(sys.argv[2]), {"CC": "false"}))
"""


def test_a_program_that_waits_for_all_children_changes_nothing(tmp_path: Path) -> None:
    path, other = build.place(tmp_path), build.place(tmp_path / "other")

    # In a process of its own, as this one may have children of other tests.
    program = [sys.executable, "-c", REAPS, str(path), str(other)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=60, check=True)

    assert done.stdout == "None false failed: it said nothing\n"
    assert isinstance(build.load(path), ModuleType)


def test_a_program_that_ignores_the_end_of_children_changes_nothing(tmp_path: Path) -> None:
    path = build.place(tmp_path)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert build.compile_once(path) is None
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert isinstance(build.load(path), ModuleType)


def test_processes_that_compile_at_once_do_not_meet(tmp_path: Path) -> None:
    """And a file that was left by one that was killed is in nobody's way."""
    path, go = build.place(tmp_path), tmp_path / "go"
    path.parent.mkdir(parents=True, mode=0o700)
    left = path.with_name(f".0123456789abcdef.{path.name}")
    left.write_text("half")
    waits = f"n=0; while ! [ -e {go} ] && [ $n -lt 1200 ]; do n=$((n + 1)); sleep 0.05; done"
    slow = {"CC": script(tmp_path / "cc", f"{TO}; echo $$ >$to; {waits}; echo $$ >>$to")}

    with ThreadPoolExecutor(3) as pool:
        compilations = [pool.submit(build.compile_once, path, slow) for _ in range(3)]
        end = time.monotonic() + WAIT_S
        while len([*path.parent.glob(".*.so")]) < 4:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert not path.exists()
        go.touch()
        assert [each.result() for each in compilations] == [None] * 3

    first, second = path.read_text().split()
    assert first == second
    assert {*path.parent.iterdir()} == {path, left}


@pytest.mark.parametrize("level", range(4), ids=["the file", "its folder", "all compiled files", "the cache"])
def test_what_others_can_write_to_is_not_loaded(compiled: Path, tmp_path: Path, level: int) -> None:
    copy = build.place(tmp_path / "cache")
    copy.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(compiled, copy)
    assert isinstance(build.load(copy), ModuleType)
    open_to_others = [copy, *copy.parents][level]

    open_to_others.chmod(0o777)

    assert build.load(copy) == f"{open_to_others} can be written by others"


@pytest.mark.parametrize(
    ("mode", "is_loaded"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)]
)
def test_further_up_only_sticky_folders_may_be_shared(
    compiled: Path, tmp_path: Path, mode: int, is_loaded: bool
) -> None:
    copy = build.place(tmp_path / "shared" / "cache")
    copy.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(compiled, copy)
    (tmp_path / "shared").chmod(mode)

    loaded = build.load(copy)

    assert isinstance(loaded, ModuleType) is is_loaded
    assert is_loaded or loaded == f"{tmp_path / 'shared'} can be written by others"


def test_the_file_that_was_checked_is_loaded_whatever_replaced_it(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = build.place(tmp_path / "cache")
    copy.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(compiled, copy)
    check = build._not_ours

    def check_and_replace(descriptor: int) -> str | None:
        reason = check(descriptor)
        copy.unlink()
        copy.write_bytes(b"another user's")
        return reason

    monkeypatch.setattr(build, "_not_ours", check_and_replace)

    assert isinstance(build.load(copy), ModuleType)


def test_what_is_refused_leaves_no_descriptor_open_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = build.place(tmp_path)
    path.parent.mkdir(parents=True, mode=0o700)
    os.mkfifo(path, 0o600)
    before = len([*Path("/proc/self/fd").iterdir()])

    assert "can be written by others" in str(build.load(path))
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_whatever_the_umask_what_is_made_is_ours_alone(tmp_path: Path) -> None:
    path = build.place(tmp_path / "cache")
    before = os.umask(0o002)
    try:
        assert build.compile_once(path) is None
    finally:
        os.umask(before)

    assert isinstance(build.load(path), ModuleType)
    made = [path, *path.parents[:3]]
    assert [each.stat().st_mode & 0o077 for each in made] == [0] * 4


def test_a_module_of_the_users_of_this_name_stays(compiled: Path) -> None:
    mine = ModuleType("helper")
    sys.modules["helper"] = mine
    try:
        assert isinstance(build.load(compiled), ModuleType)
        assert sys.modules["helper"] is mine
    finally:
        del sys.modules["helper"]


def test_a_python_without_a_lock_of_its_own_cannot_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else "abi")

    assert "GIL" in str(build.compile_once(build.place(tmp_path)))


def test_a_file_that_is_broken_is_not_loaded(tmp_path: Path) -> None:
    path = build.place(tmp_path)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no machine code")

    assert "cannot be loaded" in str(build.load(path))
