"""A run of `python -m benchmarks clients`: a process for each variant, into a file with which the next run goes on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.variants import select_variants
from tools.lab import cli
from tools.lab.clients import process
from tools.lab.clients.catalogue import FOLDER, Client
from tools.lab.clients.process import Settings
from tools.lab.clients.records import read_clients
from tools.lab.clients.run import ClientsRun, Plan
from tools.lab.gpu_slots import VISIBLE, GpuSlot, joined

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
PROGRAM = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import torch
from measuring import Clock, run

def main(mode, steps, tiny):
    if mode == "reduce-overhead":
        raise ValueError("not in this mode")
    clock, x = Clock(steps), torch.ones(3)
    for _ in range(steps):
        clock.begin()
        x = 2 * x
        clock.end(x)
    return clock.result(tolerance=0.01)

run(main, __doc__)
"""


def plan_of(folder: Path, *variants: str) -> Plan:
    return Plan(
        clients=(Client("tiny", folder=folder), Client("none", ("no_such_library",), folder=folder)),
        variants=select_variants(list(variants)),
        repetitions=1,
        settings=Settings(steps=3, tiny=True, compile_s=120, timed_s=120, logs=folder / "logs"),
        slots=(GpuSlot(0),),
        end_s=600,
        out=folder / "out.json",
    )


@pytest.mark.usefixtures("in_forks")
def test_a_run_goes_on_with_what_its_file_lacks(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(PROGRAM)

    first = ClientsRun(plan_of(tmp_path, "eager", "default")).execute()
    again = ClientsRun(plan_of(tmp_path, "eager", "default", "reduce-overhead"))
    records = {(each.client, each.variant): each for each in again.execute()}

    assert [each.raised for each in first] == [""] * 4
    assert records["tiny", "eager"].checks == {"values": [2.0, 4.0, 8.0]}
    assert records["tiny", "eager"].agrees is True
    assert records["tiny", "reduce-overhead"].raised == "ValueError: not in this mode"
    assert records["none", "default"].skipped == "no_such_library is not installed"
    assert {each.key: each.seconds for each in first}.items() <= {
        e.key: e.seconds for e in again.records
    }.items()
    assert read_clients(tmp_path / "out.json") == again.records
    assert again.unmeasured == []
    assert cli.main(["table", str(tmp_path / "out.json")]) == 0
    assert (tmp_path / "logs" / "tiny.eager.1.log").read_text().startswith("RESULT")

    other = plan_of(tmp_path, "eager")
    with pytest.raises(BenchmarkError, match="another steps"):
        ClientsRun(
            dataclasses.replace(other, settings=dataclasses.replace(other.settings, steps=9))
        ).execute()


@pytest.mark.usefixtures("in_forks")
def test_a_program_that_compiles_nothing_has_a_summary_with_pygraph(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(PROGRAM)

    records = ClientsRun(plan_of(tmp_path, "default", "pygraph-default")).execute()

    ours = next(each for each in records if each.key == ("tiny", "pygraph-default", 0))
    assert (ours.raised, ours.agrees, ours.difference) == ("", True, 0.0)
    assert ours.deployed == {"GRAPH": 0, "KERNELS": 0}


BESIDE = """
import os, pathlib
turn = pathlib.Path(os.environ["MEASURING_TURN"])
folder = pathlib.Path(__file__).parent
mode = __import__("sys").argv[2]
if mode != "none":
    while not (folder / "none").exists():  # it has compiled, and waits for its turn
        pass
(folder / mode).touch()
turn.with_name(turn.name + ".ready").touch()
while not turn.with_name(turn.name + ".go").exists():
    pass
going = len(list(turn.parent.glob("*.go")))
over = len(list(turn.parent.glob("*.timed")))
print("RESULT", '{"step_ms": 1.0, "checks": {"alone": [%d]}}' % (going - over), flush=True)
turn.with_name(turn.name + ".timed").touch()
while mode == "none":
    pass
"""


def test_processes_compile_side_by_side_and_are_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.py").write_text(BESIDE)
    monkeypatch.setattr(process, "_EXIT_S", 0.1)

    records = ClientsRun(plan_of(tmp_path, "eager", "default", "reduce-overhead")).execute()[:3]

    assert [each.checks for each in records] == [{"alone": [1]}] * 3
    assert [each.raised for each in records] == [
        "killed: it has not ended 0 s after its result",
        "",
        "",
    ]


def test_a_process_that_does_not_compile_in_time_holds_up_no_other(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(BESIDE.replace('mode != "none"', "True"))
    plan = plan_of(tmp_path, "eager")
    late = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, compile_s=0.1))

    assert ClientsRun(late).execute()[0].raised == "killed: not compiled after 0 s"


def test_clients_of_two_gpus_take_half_of_them_at_first(tmp_path: Path) -> None:
    slots = tuple(GpuSlot(number, ((VISIBLE, f"{number}"),), frozenset({number})) for number in range(4))
    plan = dataclasses.replace(plan_of(tmp_path, "eager"), slots=slots)
    two = dataclasses.replace(plan, clients=(*plan.clients, Client("two", gpus=2)))
    only_two = dataclasses.replace(plan, clients=(Client("two", gpus=2),))

    def numbers(of: Plan) -> list[list[int]]:
        return [[slot.number for slot in group] for group in ClientsRun(of)._groups()]

    assert numbers(plan) == [[0], [1], [2], [3]]
    assert numbers(two) == [[0], [1], [2, 3]]
    assert numbers(only_two) == [[0, 1], [2, 3]]
    assert joined(slots[2:]) == GpuSlot(2, ((VISIBLE, "2,3"),), frozenset({2, 3}))


@pytest.mark.parametrize("variant", ["pygraph-warm", "cuda-graph", "none"])
def test_variants_that_clients_have_none_of_are_refused(variant: str, tmp_path: Path) -> None:
    assert cli.main(["clients", "--out", str(tmp_path / "out.json"), "--variants", variant]) == 2
