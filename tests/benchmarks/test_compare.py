"""A variant against the better of its baselines: which one that is, what passes for noise, and what is said of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.compare import BAD, Comparison, Verdict, compare, render
from benchmarks.records import Record, write_result
from tests.support.benchmark_commands import benchmarks

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def record(variant: str, *medians: float, windows: list[float] | None = None) -> Record:
    """Return what a variant came to in processes with these median steps and these median windows."""
    return Record(
        "three-ops",
        "inference",
        1,
        variant,
        repetition_medians_ms=list(medians),
        repetition_pipelined_ms=windows or [],
    )


def compared(*records: Record) -> Comparison:
    (found,) = compare(records, "pygraph-cold")
    return found


@pytest.mark.parametrize(
    ("mine", "default", "theirs", "ratio", "noise", "verdict"),
    [
        ([0.9], [1.0], [2.0], 0.9, None, Verdict.FASTER_UNKNOWN),
        ([1.0], [2.0], [1.0], 1.0, None, Verdict.FASTER_UNKNOWN),
        ([0.9, 0.9], [1.0, 1.05], [2.0], 0.9 / 1.025, 0.05, Verdict.FASTER),
        ([0.9, 0.9], [1.0, 1.25], [2.0], 0.8, 0.25, Verdict.NOISE),
        ([1.1], [1.0], [2.0], 1.1, None, Verdict.UNKNOWN),
        ([1.1, 1.1], [2.0], [1.0], 1.1, 0.0, Verdict.SLOWER),
        ([1.1, 1.1], [1.0, 1.25, 1.0], [], 1.1, 0.25, Verdict.NOISE),
        ([1.0, 1.2], [1.0, 1.0], [], 1.1, 0.2, Verdict.NOISE),
        # Not the noise of the baseline that is slower anyway.
        ([1.1, 1.1], [1.0, 1.0], [2.0, 9.0], 1.1, 0.0, Verdict.SLOWER),
        ([1.0], [], [], None, None, Verdict.ALONE),
        ([], [1.0], [1.0], None, None, Verdict.FAILED),
    ],
)
def test_the_better_baseline_and_the_noise_of_both_decide(
    mine: list[float],
    default: list[float],
    theirs: list[float],
    ratio: float | None,
    noise: float | None,
    verdict: Verdict,
) -> None:
    found = compared(
        record("pygraph-cold", *mine), record("default", *default), record("reduce-overhead", *theirs)
    )

    assert found.waited_for.ratio == pytest.approx(ratio)
    assert found.waited_for.noise == pytest.approx(noise)
    assert found.waited_for.verdict is verdict
    assert (found.waited_for.verdict in BAD) is (verdict in {Verdict.SLOWER, Verdict.FAILED})


def test_back_to_back_another_baseline_may_be_the_better_one() -> None:
    found = compared(
        record("pygraph-cold", 1.0, windows=[0.6]),
        record("default", 2.0, windows=[0.5]),
        record("reduce-overhead", 1.25, windows=[0.8]),
    )

    assert found.waited_for.ratio == 0.8
    assert found.back_to_back.ratio == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("mine", "default", "noise", "verdict"),
    [
        ([1.0, 1.2], [1.0, 1.0], 0.2, "within noise"),
        ([1.1, 1.1], [1.0, 1.05], 0.05, "SLOWER"),
        ([0.9, 0.9], [1.0, 1.0], 0.0, "faster"),
        ([1.1], [1.0], None, "slower (noise not known)"),
        ([1.1], [], None, "nothing to compare"),
        ([], [1.1], None, "nothing to compare"),
    ],
)
def test_back_to_back_has_a_noise_and_a_verdict_of_its_own(
    mine: list[float], default: list[float], noise: float | None, verdict: str
) -> None:
    found = compared(
        record("pygraph-cold", 1.0, 1.0, windows=mine), record("default", 2.0, 2.0, windows=default)
    )

    assert found.waited_for.verdict is Verdict.FASTER
    assert found.back_to_back.noise == pytest.approx(noise)
    assert found.back_to_back.verdict is Verdict(verdict)


def test_back_to_back_every_process_counts_the_same_whichever_file_it_is_in() -> None:
    slow = record("pygraph-cold", 1.0, 1.0, windows=[1.0, 2.0])
    others = record("pygraph-cold", 1.0, 1.0, windows=[0.9, 1.0])
    found = compared(slow, others, record("default", 1.0, 1.0, windows=[1.0, 1.0]))

    assert found.back_to_back.ratio == 1.0  # of the two files' medians it would be 1.25


def test_processes_of_several_files_are_taken_together() -> None:
    found = compared(
        *(record("pygraph-cold", 1.2, windows=[2.0]), record("default", 1.0, windows=[1.0])),
        *(record("pygraph-cold", 1.0, windows=[1.0]), record("default", 1.25, windows=[1.0])),
        record("reduce-overhead"),  # has failed
        record("reduce-overhead", 1.0, windows=[3.0]),
    )

    assert found.waited_for.ms == {
        "pygraph-cold": pytest.approx(1.1),
        "default": 1.125,
        "reduce-overhead": 1.0,
    }
    assert found.waited_for.ratio == pytest.approx(1.1)
    assert found.waited_for.noise == pytest.approx(0.2)
    assert found.back_to_back.ratio == pytest.approx(1.5)
    assert found.waited_for.verdict is Verdict.NOISE
    assert found.back_to_back.noise == 1.0  # each file has one process of each


def test_a_peer_that_has_failed_in_one_file_has_failed() -> None:
    found = compared(record("pygraph-cold", 0.5), record("default", 1.0), record("pygraph-cold"))

    assert found.waited_for.verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("mine", "theirs", "ratio"),
    [
        ([832.0], [690.0], 1.206),
        ([690.0, 866.0], [768.0, 690.0], 1.128),
        ([None], [690.0], None),
        ([832.0], [None], None),
    ],
)
def test_reserved_memory_is_held_against_that_of_the_same_mode(
    mine: list[float | None], theirs: list[float | None], ratio: float | None
) -> None:
    def reserved(variant: str, each: float | None) -> Record:
        return dataclasses.replace(record(variant, 1.0), reserved_mb=each)

    found = compared(
        *(reserved("pygraph-cold", each) for each in mine),
        *(reserved("reduce-overhead", each) for each in theirs),
        reserved("default", 1.0),
    )

    assert found.reserved_ratio == pytest.approx(ratio, abs=1e-3)


def test_a_line_for_each_workload_and_what_they_come_to() -> None:
    records = [
        record("pygraph-cold", 1.1, 1.1, windows=[2.0]),
        record("default", 1.0, 1.25, windows=[1.0, 1.0]),
    ]

    _, line, *sums = render(compare(records, "pygraph-cold"), "pygraph-cold").splitlines()

    expected = "three-ops 1.125 - 1.100 0.978 25.0% within noise 2.000 0.0% SLOWER -"
    assert line.split() == expected.split()
    assert sums == [
        "waited for, 1 workloads: 1 within noise; geometric mean 0.978, at most 0.978",
        "back to back, 1 workloads: 1 SLOWER; geometric mean 2.000, at most 2.000",
    ]


@pytest.mark.parametrize(
    ("variant", "gpu", "workloads"), [("pygraph-cold", "h200", 23), ("pygraph-warm", "h100", 22)]
)
def test_a_stored_file_is_judged(variant: str, gpu: str, workloads: int) -> None:
    done = benchmarks("compare", "--variant", variant, str(RESULTS / f"steps-{gpu}.json"))

    start = f"waited for, {workloads} workloads"
    waited_for = next(line for line in done.stdout.splitlines() if line.startswith(start))
    assert done.returncode == ("SLOWER" in waited_for)


def test_all_variants_of_ours_are_compared_unless_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_result(file, {}, {}, [record(name, 1.0) for name in ("default", "pygraph-warm", "pygraph-cold")])

    done = benchmarks("compare", str(file))

    heads = [line.split()[3] for line in done.stdout.splitlines() if line.startswith("workload ")]
    assert heads == ["pygraph-cold", "pygraph-warm"]


@pytest.mark.parametrize(
    ("variant", "plain"), [("pygraph-default", "default"), ("pygraph-warm", "reduce-overhead")]
)
def test_memory_is_held_against_that_of_the_same_mode(variant: str, plain: str) -> None:
    records = [
        dataclasses.replace(
            record(name, 1.0), reserved_mb=300.0 if name == variant else 200.0 if name == plain else 1.0
        )
        for name in ("default", "reduce-overhead", variant)
    ]

    assert compare(records, variant)[0].reserved_ratio == 1.5


def test_a_file_without_the_variant_is_refused() -> None:
    done = benchmarks("compare", str(RESULTS / "steps-h200.json"), "--variant", "default-again")

    assert done.returncode == 2
    assert "name another with --variant" in done.stderr
