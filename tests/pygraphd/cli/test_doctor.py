"""The doctor says of each check what to do, and of each pattern in a summary the remedy. A torch that hangs or dies is a finding."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import doctor_probe, main, summary_files
from pygraphd.cli.doctor import Check, checks
from pygraphd.cli.doctor_patterns import findings
from pygraphd.cli.doctor_text import findings_text
from pygraphd.cli.summaries import Facts, Summary
from pygraphd.client.decisions import daemon_start
from pygraphd.daemon import control
from pygraphd.daemon.lock import acquire
from pygraphd.daemon.team.queue import Queue, publications
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import Deployment, Kind, Ping
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Deployed, Source
from pygraphd.schema.version import VERSION
from tests.support.cli_command import pygraphd

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.messages import RecordRequest

SOUND: dict[str, dict[str, Any]] = {
    "driver": {"status": 0, "cuda": "13.0"},
    "torch": {"version": "2.13.0+cu130", "cuda": "13.0", "gpus": ["NVIDIA H100"], "memory": [[2**36, 2**37]]},
    "hook": {"missing": None, "relocation": None},
    "recording": {},
    "helper": {"path": "/c/helper.so", "state": "loaded", "why": None},
}  # fmt: skip


@pytest.fixture
def locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Locations:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("PYGRAPHD_HOME", str(home))
    return locate()


def to_do(locations: Locations, **probed: dict[str, Any]) -> list[Check]:
    return [
        each for each in checks(locations, SOUND | probed) if not each.is_ok and each.name != "permissions"
    ]


def test_a_sound_machine_has_nothing_to_do(locations: Locations) -> None:
    assert to_do(locations) == []
    assert not locations.database.exists()


@pytest.mark.parametrize(
    ("stage", "facts", "remedy"),
    [
        ("driver", {"error": "no libcuda.so.1"}, "--gpus all"),
        ("driver", {"status": 803}, "reboot"),
        ("torch", {"cuda": None, "gpus": []}, "has no CUDA"),
        ("torch", {"gpus": []}, "torch sees no GPU"),
        ("torch", {"version": "2.9.1"}, "2.11 to 2.15"),
        ("torch", {"memory": [[2**20, 2**37]]}, "room beside the model"),
        ("hook", {"missing": "torch lacks x"}, "does nothing"),
        ("hook", {"relocation": "torch lacks y"}, "left to PyTorch"),
        ("recording", {"error": "the driver is too old"}, "left to PyTorch until"),
        ("helper", {"error": "no answer within 120 s"}, "left to PyTorch"),
        ("helper", {"state": "refused", "why": "others may write it"}, "delete /c/helper.so"),
        ("helper", {"state": "absent", "why": "no C compiler"}, "install gcc"),
    ],
)
def test_each_fault_has_a_remedy(
    locations: Locations, stage: str, facts: dict[str, Any], remedy: str
) -> None:
    (check,) = to_do(locations, **{stage: SOUND[stage] | facts})

    assert remedy in check.remedy


def test_without_a_gpu_graphs_are_said_to_run_as_kernels(locations: Locations) -> None:
    found = {"torch": SOUND["torch"] | {"gpus": []}, "recording": {"error": "no libcuda.so.1"}}

    remedies = {each.name: each.remedy for each in to_do(locations, **found)}

    assert remedies["recording"] == "without a GPU graphs run as KERNELS"


def test_a_folder_that_others_may_write_to_is_found(locations: Locations) -> None:
    locations.cache.chmod(0o777)

    assert any("chmod 700" in each.found for each in to_do(locations) if each.name == "runtime folder")


@pytest.mark.parametrize(("mounted", "is_network"), [("shared home", True), ("shared", False)])
def test_a_folder_of_a_network_is_found_by_the_whole_path_of_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: str, is_network: bool
) -> None:
    """The kernel writes a space in a path as an escaped octal number."""
    home = tmp_path / "shared home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("PYGRAPHD_HOME", str(home))
    mounts = tmp_path / "mounts"
    escaped = str(tmp_path / mounted).replace(" ", "\\040")
    mounts.write_text(f"/dev/root / ext4 rw 0 0\nserver:/home {escaped} nfs4 rw 0 0\n")
    monkeypatch.setattr("pygraphd.cli.doctor.MOUNTS", mounts)

    assert any("is on nfs4" in each.found for each in to_do(locate())) is is_network


@pytest.mark.parametrize("where", ["file", "variable"])
def test_what_keeps_the_daemon_from_starting_is_said(
    locations: Locations, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "file":
        (locations.runtime / "config.toml").write_text("foo = 1")
    else:
        monkeypatch.setenv("PYGRAPHD_IDLE_EXIT", "soon")

    (check,) = to_do(locations)

    said = {"file": "config.toml: unknown setting 'foo'", "variable": "PYGRAPHD_IDLE_EXIT: 'soon'"}
    assert check.found.startswith("cannot be started: ")
    assert said[where] in check.found
    assert "Settings" in check.remedy


@pytest.mark.parametrize("is_spooled", [False, True])
def test_a_daemon_that_hangs_is_not_said_to_be_well_or_not_to_run(
    locations: Locations, is_spooled: bool
) -> None:
    if is_spooled:
        locations.spool.mkdir(mode=0o700)
        (locations.spool / "1.json").touch()
    held = acquire(locations)
    assert held is not None
    with held:
        found = [each for each in checks(locations, SOUND) if each.name == "daemon"]

    hung, *others = found
    assert "holds the lock but does not answer" in hung.found
    assert [each.found for each in others] == (["1 file waits in the spool"] if is_spooled else [])
    assert not any(each.is_ok for each in found)


def test_what_will_keep_the_next_daemon_from_starting_is_said_beside_one_that_runs(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    (locations.runtime / "config.toml").write_text("foo = 1")
    monkeypatch.setattr(control, "ping", lambda _path: Ping("pygraphd", VERSION, 1, 7, ()))
    monkeypatch.setattr(control, "stats", lambda _path: {})

    (check,) = to_do(locations)

    assert "config.toml: unknown setting 'foo'" in check.found
    assert "the next start will fail: correct or remove it" in check.found


def test_a_read_only_file_system_is_not_told_to_be_changed_in_mode(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda _path: Found)
    monkeypatch.setattr(os, "access", lambda *_words, **_options: False)

    (check,) = (each for each in to_do(locations) if each.name == "runtime folder")

    assert check.found.endswith("its file system is read-only")
    assert check.remedy == "set PYGRAPHD_HOME to a folder on a file system that can be written to"


@pytest.mark.parametrize(
    ("autostart", "said"),
    [
        ({"why_not": None}, "not running, 0 entries; a program starts one when it needs it"),
        (
            {"why_not": "CI is set"},
            "not running, 0 entries; no program starts one here (CI is set), `pygraphd start` does",
        ),
        ({"error": "no answer within 120 s"}, "not running, 0 entries"),
    ],
)
def test_who_starts_the_daemon_is_said(locations: Locations, autostart: dict[str, Any], said: str) -> None:
    made = checks(locations, SOUND | {"autostart": autostart})

    assert [(each.found, each.is_ok) for each in made if each.name == "daemon"] == [(said, True)]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PYGRAPHD_AUTOSTART": "0"},
        {"PYGRAPHD_AUTOSTART": "1", "SLURM_JOB_ID": "7"},
        {"SLURM_JOB_ID": "7"},
        {"PYGRAPH_READONLY": "1", "PYGRAPHD_AUTOSTART": "1"},
    ],
)
def test_the_rule_of_programs_is_the_one_that_is_told(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('it must not be needed')\n")
    expected = "PYGRAPH_READONLY=1" if "PYGRAPH_READONLY" in variables else daemon_start.why_not(variables)

    found = doctor_probe.probe({"PYTHONPATH": str(tmp_path)} | variables)

    assert found["autostart"] == {"why_not": expected}


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [({}, ""), ({"PYGRAPHD_TEAM_URL": "postgresql+psycopg://h/team"}, "pygraphd start")],
)
def test_records_that_wait_for_a_team_are_told(
    locations: Locations,
    make_request: Callable[..., RecordRequest],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    remedy: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    queue = Queue(locations.team_queue)
    queue.put(publications(make_request("a"), uid=0, now=1000.0))
    queue.close()

    (check,) = (each for each in checks(locations, SOUND) if each.name == "team")

    assert check.found.startswith("1 record waits to be published")
    assert check.remedy == remedy


def test_the_folder_of_the_settings_is_looked_at_if_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYGRAPHD_HOME", raising=False)
    for name, place in {"XDG_CONFIG_HOME": "c", "XDG_CACHE_HOME": "k", "XDG_RUNTIME_DIR": "r"}.items():
        monkeypatch.setenv(name, str(tmp_path / place))
    folder = tmp_path / "c" / "pygraphd"

    def found() -> Check:
        (check,) = (each for each in checks(locate(), SOUND) if each.name == "config folder")
        return check

    assert found() == Check("config folder", f"there is no {folder}, so there are no settings in a file")
    assert not folder.parent.exists()
    folder.parent.mkdir()
    (tmp_path / "dotfiles").mkdir(mode=0o755)
    folder.symlink_to(tmp_path / "dotfiles")
    assert found() == Check("config folder", str(folder))
    (tmp_path / "dotfiles").chmod(0o777)
    assert "chmod 700" in found().found
    assert not found().is_ok
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert not [each for each in checks(locate(), SOUND) if each.name == "config folder"]


def test_a_torch_that_dies_or_hangs_is_told_by_its_stage(tmp_path: Path) -> None:
    torch = tmp_path / "torch.py"
    torch.write_text("import os\nos._exit(7)\n")

    assert doctor_probe.probe({"PYTHONPATH": str(tmp_path)})["torch"] == {"error": "Python ended with code 7"}

    torch.write_text("import time\ntime.sleep(600)\n")
    found = doctor_probe.probe({"PYTHONPATH": str(tmp_path)}, limit_s=0.5)
    assert [*found.values()][-1] == {"error": "no answer within 0.5 s"}


@pytest.mark.parametrize(
    ("mode", "said"), [(0o600, "cannot be run: Permission denied"), (0o700, "Python ended with code 3")]
)
def test_a_python_that_does_not_run_has_a_remedy_of_its_own(
    locations: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(mode)
    monkeypatch.setattr(sys, "executable", str(python))

    made = checks(locations, doctor_probe.probe())

    (check,) = (each for each in made if not each.is_ok and each.name != "permissions")
    assert check.name == "python"
    assert said in check.found
    assert f"run `{python} -c pass`" in check.remedy
    assert not {"driver", "torch", "recording", "helper"} & {each.name for each in made}


# --- patterns ---


def ran(
    code: ReasonCode, detail: str = "", graph: str = "a", deployment: Deployment = Deployment.KERNELS
) -> Deployed:
    return Deployed(graph * 64, Kind.FORWARD, "e" * 64, deployment, Reason(code, detail), True, Source.RULE)


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("graph_breaks", "Unsupported Tensor.item() call with capture_scalar_outputs=False (a.py:3)", "host reads"),
        ("graph_breaks", "Data-dependent branching (a.py:4)", "host reads"),
        ("graph_breaks", "Call to `print` (a.py:5)", "graph breaks"),
        ("left_on_cpu", "index of the CPU: it is a mask (a.py:6)", "CPU tensors"),
        ("fallbacks", "more dynamic sizes than may have a decision of their own (PYGRAPH_SIZES)", "sizes that are not repeated"),
        ("fallbacks", "dynamic sizes that were called too few times to be decided", "sizes that are not repeated"),
        ("fallbacks", "first call of a size", None),
        ("fallbacks", "called with other sizes while it was measured", None),
        ("fallbacks", "called from another thread while a dynamic size was looked up", None),
        ("fallbacks", "measured anew, since a call takes over 20 % more or less here than where that was decided", None),
        ("fallbacks", "captured as often as is allowed", "sizes that are not repeated"),
        ("fallbacks", "out of memory in a replay", "memory"),
        ("fallbacks", "called while the user captures the stream", "disturbed captures"),
        ("left_to_torch", "PYGRAPH_RELOCATE=0", "left to PyTorch"),
        ("left_to_torch", "it has collectives, and PYGRAPH_COLLECTIVES is 0", "collectives"),
        ("left_to_torch", "its collectives cannot be captured: NCCL_GRAPH_REGISTER=1", "collectives"),
        ("failures", "daemon: no daemon", "the daemon"),
        ("failures", "bundle: /shared: InvalidMessageError", "the bundle"),
        ("failures", "bundle: PermissionError: [Errno 13] Permission denied", "the bundle"),
        ("failures", "anything", "other reasons"),
    ],
)  # fmt: skip
def test_each_reason_has_its_pattern(kind: str, text: str, pattern: str | None) -> None:
    found = findings(Summary({}, (), 0, {kind: {text: 3}}))

    assert [(each.name, each.seen) for each in found] == ([(pattern, ((text, 3),))] if pattern else [])
    assert all(each.remedy for each in found)


def test_graphs_that_run_as_kernels_have_theirs_with_their_lines(tmp_path: Path) -> None:
    decisions = (
        ran(ReasonCode.CUSTOM_OPERATORS, "mine::rope", "b"),
        ran(ReasonCode.CANNOT_BE_RECORDED, "it holds an operator that nobody vouches for", "c"),
        ran(ReasonCode.DECIDED_BY_SIZE, graph="d"),
        ran(ReasonCode.DECIDED_BY_SIZE, graph="f"),
        ran(ReasonCode.COLLECTIVES, "NCCL_GRAPH_REGISTER=1"),
        ran(ReasonCode.NO_GAIN),
        ran(ReasonCode.FASTER, deployment=Deployment.GRAPH),
    )
    facts = {"b" * 64: Facts(places=("model.py:7 in forward",)), "1" * 64: Facts(whole="f" * 64)}

    found = findings(Summary({}, decisions, 0, {}, facts))
    text = findings_text(found, tmp_path / "s.json", "train.py")

    assert [(each.name, len(each.seen)) for each in found] == [
        ("unvouched operators", 2),
        ("sizes that are not repeated", 1),
        ("collectives", 1),
    ]
    assert "mine::rope (model.py:7 in forward)" in text


# --- the command ---

BREAKS: dict[str, Any] = {
    "schema": 2,
    "environments": {},
    "decisions": [],
    "graph_breaks": {"print (x:3)": 1},
}


def leave_summary(program: str, locations: Locations) -> Path:
    """Leave a summary as `pygraphd run` has a program leave it."""
    file = Path(summary_files.variable_for(program, locations, {})["PYGRAPH_SUMMARY"])
    file.write_text(json.dumps(BREAKS))
    return file


def test_the_command_takes_a_script(
    locations: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert pygraphd("doctor", "train.py") == 2
    assert "train.py: there is no such file; give the path" in capsys.readouterr().err
    (tmp_path / "train.py").touch()
    assert pygraphd("doctor", "train.py") == 2
    assert "pygraphd run train.py" in capsys.readouterr().err

    leave_summary("train.py", locations)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "train.py", "--json"])

    answer = json.loads(capsys.readouterr().out)
    assert caught.value.code == 1
    assert [each["name"] for each in answer["patterns"]] == ["graph breaks"]
    assert {"torch", "driver", "daemon", "cache folder"} - {each["name"] for each in answer["checks"]} <= {
        "cache folder"
    }
    assert "broken" in next(each["found"] for each in answer["checks"] if each["name"] == "torch")


@pytest.fixture
def summary_asked_for(
    locations: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Return a function with the summary that a word names to `doctor`, or the error; torch is not looked for."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def ask(word: str) -> str:
        with pytest.raises(SystemExit):
            main(["doctor", word, "--json"])
        shown = capsys.readouterr()
        return str(json.loads(shown.out)["summary"]) if shown.out else shown.err

    return ask


@pytest.mark.parametrize("name", ["train", "train.sh", "bin/train", "a.train.py", "tools.train"])
def test_a_script_of_any_name_and_a_module_are_found(
    locations: Locations, tmp_path: Path, summary_asked_for: Callable[[str], str], name: str
) -> None:
    (tmp_path / "bin").mkdir()
    if name != "tools.train":  # the name of a module
        (tmp_path / name).write_text("#!/usr/bin/env python\n")
    kept = leave_summary(name, locations)

    assert summary_asked_for(name) == str(kept)


@pytest.mark.parametrize(("asked", "other"), [("train.py", "my.train.py"), ("train", "my.train")])
def test_a_name_that_ends_like_another_is_not_taken_for_it(
    locations: Locations, tmp_path: Path, summary_asked_for: Callable[[str], str], asked: str, other: str
) -> None:
    for name in (asked, other):
        (tmp_path / name).write_text("#!/usr/bin/env python\n")
    leave_summary(other, locations)

    said = summary_asked_for(asked)

    assert said.startswith(f"pygraphd: {asked}: ")
    assert "pygraphd run" in said


def test_a_file_that_is_a_summary_is_one_though_a_script_has_its_name(
    locations: Locations, tmp_path: Path, summary_asked_for: Callable[[str], str]
) -> None:
    leave_summary("train", locations)
    (tmp_path / "train").write_text(json.dumps(BREAKS))

    assert summary_asked_for("train") == "train"
