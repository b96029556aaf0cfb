"""What deciding takes as a share of compiling: what counts as known, the medians, and what is said of them."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.records import Record
from tools.lab.overhead import PARTS, overheads, render

MEASURING, LOOKING_UP, RECORDING = PARTS


def cold(workload: str, measuring_s: float | None, compile_s: float | None) -> Record:
    return Record(workload, "inference", 1, "pygraph-cold", measuring_s=measuring_s, compile_s=compile_s)


def warm(workload: str, compile_s: float | None = 10.0, measuring_s: float | None = 0.0) -> Record:
    return Record(
        workload, "inference", 1, "pygraph-warm",
        compile_s=compile_s, lookup_s=0.01, checking_s=0.02, measuring_s=measuring_s, recording_s=0.5,
    )  # fmt: skip


def test_a_cold_start_pays_for_measuring_and_a_warm_one_for_what_it_knows() -> None:
    records = [cold("three-ops", 0.2, 10.0), warm("three-ops")]

    shares = [each.share for part in PARTS for each in overheads(records, part)]

    assert shares == pytest.approx([0.02, 0.003, 0.053])


def test_a_warm_start_pays_for_what_it_has_to_measure_all_the_same() -> None:
    (found,) = overheads([warm("three-ops", measuring_s=0.1)], LOOKING_UP)

    assert found.share == pytest.approx(0.013)


@pytest.mark.parametrize(
    "record",
    [
        cold("three-ops", 0.2, None),
        cold("three-ops", None, 10.0),
        dataclasses.replace(cold("three-ops", 0.2, 10.0), compiled_together=True),
        dataclasses.replace(warm("three-ops"), lookup_s=None),
        warm("three-ops", compile_s=None),
        dataclasses.replace(warm("three-ops"), compiled_together=True),
    ],
)
def test_a_record_that_does_not_say_it_all_is_left_out(record: Record) -> None:
    assert [overheads([record], part) for part in PARTS] == [[], [], []]


def test_of_several_records_the_median_of_those_that_say_it_counts() -> None:
    records = [
        cold("three-ops", 9.0, None),
        *(cold("three-ops", spent_s, 10.0) for spent_s in (0.1, 0.2, 0.9)),
    ]

    (found,) = overheads(records, MEASURING)

    assert (found.spent_s, found.compile_s) == (0.2, 10.0)


def test_a_line_for_each_and_the_medians() -> None:
    records = [
        cold("three-ops", 0.2, 10.0),
        cold("bert-training", 0.9, None),
        cold("mlp-training", 0.4, 10.0),
    ]

    _, *lines, measuring, looking_up, _ = render(records).splitlines()

    assert [line.split()[-3:] for line in lines] == [["0.2000", "10.0", "2.00%"], ["0.4000", "10.0", "4.00%"]]
    assert measuring == "measuring, empty cache: 3.00% in the median of 2 workloads"
    assert looking_up == "looking up and checking, filled cache: -"
