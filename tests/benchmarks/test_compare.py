"""A peer against the better of its rivals: which one that is, what passes for noise, and what is said of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import BAD, Comparison, Verdict, compare, render
from benchmarks.details import Details
from benchmarks.figures import Figure
from benchmarks.records import Record, write_result
from tests.benchmarks.test_cli import benchmarks

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def record(
    peer: str,
    *medians: float,
    pipelined: float | None = None,
    mad: float = 0.0,
    windows: list[float] | None = None,
) -> Record:
    """Return what a peer came to in processes with these median steps, and these median windows if they are known."""
    figure = Figure(pipelined, mad, 4) if pipelined else None
    made = Record(
        "three-ops", "inference", 1, peer, None, None, figure, list(medians), None, None, None, None, None, None, ""
    )  # fmt: skip
    return dataclasses.replace(made, details=Details(repetition_pipelined_ms=windows))


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
        # Not the noise of the rival that is slower anyway.
        ([1.1, 1.1], [1.0, 1.0], [2.0, 9.0], 1.1, 0.0, Verdict.SLOWER),
        ([1.0], [], [], None, None, Verdict.ALONE),
        ([], [1.0], [1.0], None, None, Verdict.FAILED),
    ],
)
def test_the_better_rival_and_the_noise_of_both_decide(
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

    assert found.ratio == pytest.approx(ratio)
    assert found.noise == pytest.approx(noise)
    assert found.verdict is verdict
    assert (found.verdict in BAD) is (verdict in {Verdict.SLOWER, Verdict.FAILED})


def test_back_to_back_another_rival_may_be_the_better_one() -> None:
    found = compared(
        record("pygraph-cold", 1.0, pipelined=0.6),
        record("default", 2.0, pipelined=0.5),
        record("reduce-overhead", 1.25, pipelined=0.8),
    )

    assert found.ratio == 0.8
    assert found.pipelined_ratio == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("mine", "rivals", "noise", "verdict"),
    [
        # What processes differ by, where it is known.
        (record("pygraph-cold", 1.0, 1.0, pipelined=1.1, windows=[1.0, 1.2]), {"windows": [1.0, 1.0]}, 0.2, "within noise"),
        (record("pygraph-cold", 1.0, 1.0, pipelined=1.1, windows=[1.1, 1.1]), {"windows": [1.0, 1.05]}, 0.05, "SLOWER"),
        (record("pygraph-cold", 1.0, 1.0, pipelined=0.9, windows=[0.9, 0.9]), {"windows": [1.0, 1.0]}, 0.0, "faster"),
        # Else the error of the windows' median, 1.86 * mad / sqrt(4) of it, of either the more.
        (record("pygraph-cold", 1.0, 1.0, pipelined=1.1), {"mad": 0.1}, 0.093, "SLOWER"),
        (record("pygraph-cold", 1.0, 1.0, pipelined=1.1, mad=0.22), {"mad": 0.1}, 0.186, "within noise"),
        (record("pygraph-cold", 1.0, pipelined=1.1, windows=[1.1]), {"mad": 0.1}, 0.093, "SLOWER"),
    ],
)  # fmt: skip
def test_back_to_back_has_a_noise_and_a_verdict_of_its_own(
    mine: Record, rivals: dict[str, Any], noise: float, verdict: str
) -> None:
    found = compared(mine, record("default", 2.0, 2.0, pipelined=1.0, **rivals))

    assert found.verdict is Verdict.FASTER
    assert found.pipelined_noise == pytest.approx(noise)
    assert found.pipelined_verdict is Verdict(verdict)


def test_back_to_back_every_process_counts_the_same_whichever_file_it_is_in() -> None:
    slow = record("pygraph-cold", 1.0, 1.0, pipelined=1.5, windows=[1.0, 2.0])
    others = record("pygraph-cold", 1.0, 1.0, pipelined=1.0, windows=[0.9, 1.0])
    found = compared(slow, others, record("default", 1.0, 1.0, pipelined=1.0, windows=[1.0, 1.0]))

    assert found.pipelined_ratio == 1.0  # of the two files' medians it would be 1.25


def test_without_windows_nothing_is_said_of_back_to_back() -> None:
    found = compared(record("pygraph-cold", 1.0), record("default", 1.0, pipelined=1.0))

    assert (found.pipelined_ratio, found.pipelined_noise, found.pipelined_verdict) == (None, None, None)


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--back-to-back",), 1)])
def test_who_loses_back_to_back_is_named_and_counts_if_it_is_asked_for(
    tmp_path: Path, flags: tuple[str, ...], code: int
) -> None:
    file = tmp_path / "result.json"
    write_result(
        file, {}, {}, [record("pygraph-cold", 1.0, pipelined=1.5), record("default", 2.0, pipelined=1.0)]
    )

    done = benchmarks("compare", str(file), *flags)

    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "back to back: 1 of 1 lose beyond noise: three-ops 1.500"


def test_processes_of_several_files_are_taken_together() -> None:
    found = compared(
        *(record("pygraph-cold", 1.2, pipelined=2.0), record("default", 1.0, pipelined=1.0)),
        *(record("pygraph-cold", 1.0, pipelined=1.0), record("default", 1.25, pipelined=1.0)),
        record("reduce-overhead"),  # has failed
        record("reduce-overhead", 1.0, pipelined=3.0),
    )

    assert found.steps_ms == {"pygraph-cold": pytest.approx(1.1), "default": 1.125, "reduce-overhead": 1.0}
    assert found.ratio == pytest.approx(1.1)
    assert found.noise == pytest.approx(0.2)
    assert found.pipelined_ratio == pytest.approx(1.5)
    assert found.verdict is Verdict.NOISE
    assert found.pipelined_noise == 1.0  # each file has one process of each


def test_a_peer_that_has_failed_in_one_file_has_failed() -> None:
    found = compared(record("pygraph-cold", 0.5), record("default", 1.0), record("pygraph-cold"))

    assert found.verdict is Verdict.FAILED


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
    def reserved(peer: str, each: float | None) -> Record:
        return dataclasses.replace(record(peer, 1.0), reserved_mb=each)

    found = compared(
        *(reserved("pygraph-cold", each) for each in mine),
        *(reserved("reduce-overhead", each) for each in theirs),
        reserved("default", 1.0),
    )

    assert found.reserved_ratio == pytest.approx(ratio, abs=1e-3)


def test_a_line_for_each_workload_and_what_they_come_to() -> None:
    records = [record("pygraph-cold", 1.1, 1.1, pipelined=2.0), record("default", 1.0, 1.25, pipelined=1.0)]

    _, line, last, back_to_back = render(compare(records, "pygraph-cold"), "pygraph-cold").splitlines()

    assert line.split() == [
        "three-ops",
        "1.125",
        "-",
        "1.100",
        "0.978",
        "25.0%",
        "within",
        "noise",
        "2.000",
        "0.0%",
        "SLOWER",
        "-",
    ]
    assert back_to_back == "back to back: 1 of 1 lose beyond noise: three-ops 2.000"
    assert last == "1 workloads: 1 within noise; 0.978 in the median, 0.978 at most"


@pytest.mark.parametrize(
    ("names", "code", "said", "back_to_back"),
    [
        (
            ["all-h200-4662d70"],
            0,
            "21 workloads: 6 faster, 13 faster (noise not known), 2 slower (noise not known)",
            "4 of 21",
        ),
        (["placed-h200-28c7926"], 1, "9 workloads: 4 faster, 3 within noise, 1 SLOWER, 1 FAILED", "4 of 8"),
        (
            ["all-h200-ebe41bd", "again-h200-ebe41bd"],
            0,
            "21 workloads: 13 faster, 8 within noise",
            "3 of 21 lose beyond noise: clip-inference 1.003, bert-training 1.144, three-ops 1.480",
        ),
    ],
)
def test_stored_files_are_judged(names: list[str], code: int, said: str, back_to_back: str) -> None:
    done = benchmarks("compare", "--peer", "pygraph-cold", *(str(RESULTS / f"{name}.json") for name in names))

    assert done.returncode == code
    assert said in done.stdout
    assert f"back to back: {back_to_back}" in done.stdout


def test_all_peers_of_ours_are_compared_unless_one_is_named() -> None:
    done = benchmarks("compare", str(RESULTS / "all-h200-ebe41bd.json"))

    heads = [line.split()[3] for line in done.stdout.splitlines() if line.startswith("workload ")]
    assert heads == ["pygraph-cold", "pygraph-unplaced"]
    assert done.returncode == 1  # the second loses where the first does not


def test_a_warm_process_may_be_held_against_a_cold_one() -> None:
    records = [
        record("pygraph-warm", 1.3, 1.3), record("pygraph-cold", 1.0, 1.1), record("default", 2.0, 2.0),
    ]  # fmt: skip
    (found,) = compare(records, "pygraph-warm", ["pygraph-cold"])

    assert found.ratio == pytest.approx(1.3 / 1.05)
    assert found.verdict is Verdict.SLOWER
    assert render([found], "pygraph-warm", ["pygraph-cold"]).split()[:3] == [
        "workload",
        "pygraph-cold",
        "pygraph-warm",
    ]


@pytest.mark.parametrize(
    ("peer", "plain"), [("pygraph-default", "default"), ("pygraph-warm", "reduce-overhead")]
)
def test_memory_is_held_against_that_of_the_same_mode(peer: str, plain: str) -> None:
    records = [
        dataclasses.replace(
            record(name, 1.0), reserved_mb=300.0 if name == peer else 200.0 if name == plain else 1.0
        )
        for name in ("default", "reduce-overhead", peer)
    ]

    assert compare(records, peer)[0].reserved_ratio == 1.5


def test_a_file_without_the_peer_is_refused() -> None:
    done = benchmarks("compare", str(RESULTS / "h200.json"), "--peer", "pygraph-unplaced")

    assert done.returncode == 2
    assert "name another with --peer" in done.stderr


def test_whose_noise_is_not_known_is_counted_with_nobody() -> None:
    one_window = record("pygraph-cold", 1.0, pipelined=2.0, windows=[2.0])
    one_window = dataclasses.replace(one_window, pipelined_ms=Figure(2.0, 0.0, 1))
    rival = dataclasses.replace(record("default", 1.0), pipelined_ms=Figure(1.0, 0.0, 1))

    said = render(compare([one_window, rival], "pygraph-cold"), "pygraph-cold").splitlines()

    assert "2.000" in said[1]
    assert "slower (noise not known)" in said[1]
    assert said[-1] == "back to back: 0 of 0 lose beyond noise; of 1 others the noise is not known"
