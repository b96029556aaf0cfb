"""What looks and their false alarms cost users, from what a program says of itself; the programs themselves need a GPU."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import cli, recheck
from benchmarks.errors import BenchmarkError
from benchmarks.processes import Outcome
from benchmarks.workloads import WORKLOADS
from pygraphd.client import options
from tests.benchmarks.test_cli import benchmarks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

QUIET: dict[str, Any] = {
    "graphs": 2,
    "rechecked": 20,
    "drifted": 0,
    "retried": 0,
    "checking_ms": 24.0,
    "measured": 2,
    "measuring_ms": 80.0,
}
ALARMED = {**QUIET, "drifted": 5, "measured": 7, "measuring_ms": 280.0}
INTERVAL_MS = options.RECHECK_S * 1e3


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what the next programs are to say of themselves."""
    answers: list[dict[str, Any]] = []

    def run_fresh(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Outcome:
        assert float(environ[options.RECHECK]) == recheck.LOOK_S
        Path(environ["PYGRAPH_SUMMARY"]).write_text(json.dumps(answers.pop(0)))
        return Outcome(None, "")

    monkeypatch.setattr(recheck, "run_fresh", run_fresh)
    return answers


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    """Put back what the command does with signals."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def record(out: Path, repetitions: int) -> dict[str, Any]:
    (only,) = recheck.measure_recheck([WORKLOADS["mlp-training"]], repetitions, out)
    assert json.loads(out.read_text())["records"] == [only]
    return only


def test_without_alarms_looks_alone_take_time(said: list[dict[str, Any]], tmp_path: Path) -> None:
    said += [QUIET]

    found = record(tmp_path / "recheck.json", 1)

    assert found["look_ms"]["median"] == 1.2
    assert found["share"] == pytest.approx(2 * 1.2 / INTERVAL_MS)


def test_a_false_alarm_costs_what_measuring_anew_does(said: list[dict[str, Any]], tmp_path: Path) -> None:
    """Also one in few repetitions, which no median of them shows."""
    said += [QUIET, ALARMED, QUIET]

    found = record(tmp_path / "recheck.json", 3)

    assert found["drifted"] == [0, 5, 0]
    assert found["measuring_ms"] == [40.0, 40.0, 40.0]
    assert found["share"] == pytest.approx(2 * (3 * 24.0 + 5 * 40.0) / 60 / INTERVAL_MS)


def test_measuring_anew_in_its_turn_comes_once_in_six_looks(
    said: list[dict[str, Any]], tmp_path: Path
) -> None:
    """How often it was here says nothing: it does not wait as long."""
    said += [QUIET, {**QUIET, "retried": 2, "measured": 4, "measuring_ms": 280.0}]

    found = record(tmp_path / "recheck.json", 2)

    assert found["retried"] == [0, 2]
    assert found["share"] == pytest.approx(2 * (1.2 + 70.0 / 6) / INTERVAL_MS)


def test_the_distance_is_that_of_users(said: list[dict[str, Any]], tmp_path: Path) -> None:
    said += [QUIET]

    found = record(tmp_path / "recheck.json", 1)

    assert found["interval_s"] == options.read({}).recheck_s


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize(
    ("measuring_ms", "code", "text"),
    [(280.0, 0, "of the time at 600 s\n"), (56_000.0, 1, "of the time at 600 s, more than 1e-03\n")],
    ids=["little", "too much"],
)
def test_the_command_fails_if_it_is_too_much(
    said: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    measuring_ms: float,
    code: int,
    text: str,
) -> None:
    said += [QUIET, {**ALARMED, "measuring_ms": measuring_ms}]
    arguments = ["recheck", "--workloads", "three-ops,mlp-training", "--repetitions", "1"]

    assert cli.main([*arguments, "--out", str(tmp_path / "recheck.json")]) == code
    assert capsys.readouterr().out.endswith(text)


def test_what_was_measured_before_a_failure_is_there(said: list[dict[str, Any]], tmp_path: Path) -> None:
    said += [QUIET, {**QUIET, "rechecked": 0}]
    out = tmp_path / "recheck.json"

    with pytest.raises(BenchmarkError):
        recheck.measure_recheck([WORKLOADS["three-ops"], WORKLOADS["mlp-training"]], 1, out)

    assert [each["workload"] for each in json.loads(out.read_text())["records"]] == ["three-ops"]


@pytest.mark.torch
def test_without_a_gpu_that_is_said_in_a_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = benchmarks("recheck", "--repetitions", "1", "--out", str(tmp_path / "result.json"))

    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks: torch sees no CUDA device here")
    assert len(done.stderr.splitlines()) == 1


def test_a_program_without_a_look_says_nothing_of_their_cost(
    said: list[dict[str, Any]], tmp_path: Path
) -> None:
    said += [{**QUIET, "rechecked": 0}]

    with pytest.raises(BenchmarkError, match="no graph was looked at"):
        recheck.measure_recheck([WORKLOADS["mlp-training"]], 1, tmp_path / "recheck.json")
