"""The sums of a suite by the definitions of PyTorch's dashboard, and the lines that PyGraph is to meet."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from benchmarks.figures import Figure
from benchmarks.records import Record
from benchmarks.workloads import Mode
from tools.lab.suites import summary
from tools.lab.suites.results import Results
from tools.lab.suites.targets import lines


def test_a_model_counts_once_in_a_mean() -> None:
    figure = Figure(1.0, 0.0, 3)
    names = ("alexnet-inference", "alexnet-inference-b2")
    both = [Record(name, "inference", 8, "eager", step_ms=figure) for name in names]

    assert list(Results.of_suite(both).models) == ["alexnet-inference"]
    assert list(Results.of_suite(both[1:]).models) == ["alexnet-inference-b2"]


def record(workload: str, variant: str, ms: float | None, **more: Any) -> Record:
    figure = ms and Figure(ms, 0.0, 5)
    return Record(
        workload, "inference", 1, variant, step_ms=figure or None, pipelined_ms=figure or None, **more
    )


RECORDS = [
    *(record("one", variant, ms) for variant, ms in (("eager", 8.0), ("default", 4.0), ("pygraph-default", 2.0))),
    *(record("two", variant, ms) for variant, ms in (("eager", 8.0), ("default", 4.0), ("pygraph-default", 5.0))),
    record("two", "default-again", 4.2),
    record("bad", "eager", 8.0),
    record("bad", "default", 1.0, correct=False, note="off by 1"),
    record("bad", "pygraph-default", 0.1, note="graphs 1; not compared: eager's results depend on chance"),
    record("dlrm-inference", "eager", None, note="KeyError: 'x'"),
]  # fmt: skip


def test_means_are_over_the_models_that_all_pass() -> None:
    settings = {"suite": "tiny", "mode": "inference", "left_out": {"other": "too large"}}
    content = {"settings": settings, "records": [dataclasses.asdict(each) for each in RECORDS]}

    shown = summary.render(content)
    rows = {line.split()[0]: line.split()[1:5] for line in shown.splitlines()[1:5]}

    assert "3 models run in eager mode, 2 pass in all of" in shown
    assert rows["default"] == ["2/3", "2", "2.000", "2.000"]
    assert rows["pygraph-default"][:3] == ["3/3", "2", f"{math.sqrt(4 * 1.6):.3f}"]
    told = {line.split("  ")[0]: line.split()[-4:] for line in shown.splitlines()}
    assert told["default over pygraph-default, waited for"] == ["1.265", "2", "NO", "two"]
    assert "largest 4.8% (two)" in shown
    assert "left out: other: too large" in shown
    assert "not compared: bad pygraph-default: eager's results depend on chance" in shown
    assert "WRONG: bad default: off by 1" in shown
    assert (
        "does not run in eager mode: dlrm-inference: KeyError: 'x' (`run` has dlrm-inference instead" in shown
    )


def line_of(records: list[Record], what: str, mode: Mode = Mode.INFERENCE) -> Any:
    (found,) = [
        each for each in lines(Results.of(records), mode) if each.what.replace("`", "").startswith(what)
    ]
    return found


def both(model: str, trees: float | None, ours: float, again: float = 4.0, **more: Any) -> list[Record]:
    return [
        *(record(model, variant, ms, reserved_mb=100.0) for variant, ms in (("eager", 8.0), ("default", 4.0), ("default-again", again))),
        record(model, "reduce-overhead", trees, reserved_mb=100.0),
        record(model, "pygraph-default", ours, **more),
    ]  # fmt: skip


def test_no_model_may_be_slower_than_the_better_of_two_by_more_than_its_noise() -> None:
    records = [*both("noisy", 2.0, 2.2, again=4.8), *both("slow", 2.0, 2.2), *both("alone", None, 3.0)]

    line = line_of(records, "better of default and reduce-overhead over pygraph-default, waited for")

    assert (line.is_met, line.missing, line.models) == (False, ("slow",), 3)
    assert line_of(records, "reduce-overhead over pygraph-default, waited for").models == 2


def test_lines_on_what_pygraph_costs_are_over_plain_variants() -> None:
    records = both("one", 2.0, 2.0, reserved_mb=120.0, measuring_s=0.5, lookup_s=0.1)
    records[1] = dataclasses.replace(records[1], compile_s=20.0)

    assert line_of(records, "peak reserved memory").figure == "1.200"
    deciding = line_of(records, "time to decide")
    assert (deciding.figure, deciding.is_met, deciding.missing) == ("3.00%", False, ("one",))
    wrong = dataclasses.replace(records[-1], correct=False)
    assert line_of([*records[:-1], wrong], "models that pygraph-default and default pass").missing == ("one",)


def test_what_is_asked_of_training_is_less() -> None:
    records = both("one", 2.0, 4.0 / 1.5)

    assert [line_of(records, "default over pygraph-default", mode).is_met for mode in Mode] == [False, True]
    assert not [each for each in lines(Results.of(records), Mode.TRAINING) if "by hand" in each.what]
