"""What deciding takes as a share of compiling: what counts as known, the medians, and what is said of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.details import Details
from benchmarks.records import Record, write_result
from tests.lab.command import lab
from tools.lab.price import BESIDE, NOT_COMPILED, NOT_COUNTED, STARTS, prices, render, too_dear

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
COLD, WARM, RECORDING = STARTS
COUNTED = Details(lookup_s=0.01, checking_s=0.02, recording_s=0.5)


def cold(workload: str, measuring_s: float | None, compile_s: float | None) -> Record:
    return Record(
        workload, "inference", 1, "pygraph-cold", None, None, None, [], None, compile_s, measuring_s, None, None, None, ""
    )  # fmt: skip


def warm(workload: str, details: Details, compile_s: float | None = 10.0) -> Record:
    return dataclasses.replace(cold(workload, 0.0, compile_s), peer="pygraph-warm", details=details)


def test_a_cold_start_pays_for_measuring_and_a_warm_one_for_what_it_knows() -> None:
    records = [cold("three-ops", 0.2, 10.0), warm("three-ops", COUNTED)]

    (measured,) = prices(records, COLD)
    (looked_up,) = prices(records, WARM)

    assert (measured.spent_s, measured.compile_s, measured.unknown) == (0.2, 10.0, None)
    assert measured.share == pytest.approx(0.02)
    assert looked_up.share == pytest.approx(0.003)
    (with_recording,) = prices(records, RECORDING)
    assert with_recording.share == pytest.approx(0.053)
    assert not too_dear(records)  # recording is told, and held against nothing


def test_a_warm_start_pays_for_what_it_has_to_measure_all_the_same() -> None:
    missed = dataclasses.replace(warm("three-ops", COUNTED), measuring_s=0.1)

    (found,) = prices([missed], WARM)

    assert found.share == pytest.approx(0.013)
    assert too_dear([missed])
    (unknown,) = prices([dataclasses.replace(missed, measuring_s=None)], WARM)
    assert unknown.unknown == NOT_COUNTED


@pytest.mark.parametrize(
    ("record", "unknown"),
    [
        (cold("three-ops", 0.2, None), NOT_COMPILED),
        (cold("three-ops", None, 10.0), NOT_COUNTED),
        (dataclasses.replace(cold("three-ops", 0.2, 10.0), details=Details(compiled_together=True)), BESIDE),
        (warm("three-ops", dataclasses.replace(COUNTED, lookup_s=None)), NOT_COUNTED),
        (warm("three-ops", COUNTED, compile_s=None), NOT_COMPILED),
        (warm("three-ops", dataclasses.replace(COUNTED, compiled_together=True)), BESIDE),
    ],
)
def test_what_does_not_say_it_all_is_not_known(record: Record, unknown: str) -> None:
    (found,) = prices([record], COLD if record.peer == COLD.peer else WARM)

    assert (found.share, found.unknown) == (None, unknown)
    assert not too_dear([record])


def test_of_several_records_those_that_say_it_count() -> None:
    records = [
        cold("three-ops", 9.0, None),
        *(cold("three-ops", spent_s, 10.0) for spent_s in (0.1, 0.2, 0.9)),
    ]

    (found,) = prices(records, COLD)

    assert (found.spent_s, found.compile_s, found.unknown) == (0.2, 10.0, None)
    assert found.share == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("cold_s", "checking_s", "dear"),
    [
        ([0.1, 0.5, 9.0], 0.04, False),
        ([0.1, 0.51, 0.52], 0.04, True),
        ([0.1, 0.1, 0.1], 0.041, True),
        ([], 0.041, True),
        ([9.0, 9.0], None, True),
    ],
)
def test_the_median_over_workloads_decides_for_each_start(
    cold_s: Sequence[float], checking_s: float | None, *, dear: bool
) -> None:
    records = [cold(f"workload {number}", spent_s, 10.0) for number, spent_s in enumerate(cold_s)]

    assert (
        too_dear([*records, warm("three-ops", dataclasses.replace(COUNTED, checking_s=checking_s))]) is dear
    )


def test_a_line_for_each_and_what_they_come_to() -> None:
    records = [
        cold("three-ops", 0.2, 10.0),
        cold("bert-training", 0.9, None),
        warm("three-ops", COUNTED, 5.0),
    ]

    head, *lines, cold_says, warm_says, recording_says = render(records).splitlines()

    assert head.split() == ["workload", "start", "spent", "s", "compile", "s", "share"]
    assert [line.split() for line in lines] == [
        ["three-ops", "cold", "0.2000", "10.0", "2.00%"],
        ["bert-training", "cold", "0.9000", "-", "not", "known"],
        ["three-ops", "warm", "0.0300", "5.0", "0.60%"],
        ["three-ops", "warm,", "recording", "0.5300", "5.0", "10.60%"],
    ]
    assert cold_says == (
        "cold: 2.00% in the median of 1 workloads, within the 5.0% allowed; left out: 1 no time to compile with empty caches"
    )
    assert warm_says == "warm: 0.60% in the median of 1 workloads, MORE THAN the 0.5% allowed"
    assert recording_says == "warm, recording: 10.60% in the median of 1 workloads"


def test_a_price_that_is_too_high_is_the_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_result(file, {}, {}, [cold("three-ops", 0.6, 10.0)])

    done = lab("price", str(file))

    assert done.returncode == 1
    assert "MORE THAN the 5.0% allowed" in done.stdout


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (
            ["h200"],
            0,
            ["cold: 0.46% in the median of 5 workloads", "warm: not known; left out: 5 not counted"],
        ),
        (
            ["all-h200-ebe41bd", "again-h200-ebe41bd"],
            2,
            ["cold: not known; left out: 21 compiled beside others"],
        ),
    ],
)
def test_stored_files_say_what_they_can(names: list[str], code: int, said: list[str]) -> None:
    done = lab("price", *(str(RESULTS / f"{name}.json") for name in names))

    assert done.returncode == code
    assert [each for each in said if each not in done.stdout] == []
    assert ("no price is known" in done.stderr) is (code == 2)
