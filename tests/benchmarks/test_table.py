from __future__ import annotations

from benchmarks.figures import Figure
from benchmarks.records import Record
from benchmarks.table import render

GOOD = Record(
    workload="three-ops",
    mode="inference",
    batch=1,
    variant="pygraph-cold",
    step_ms=Figure(0.0331, 0.002, 60),
    host_ms=Figure(0.025, 0.001, 60),
    pipelined_ms=Figure(0.023, 0.001, 3),
    repetition_medians_ms=[0.0331],
    reserved_mb=34.0,
    compile_s=6.31,
    measuring_s=0.0123,
    coverage=0.9912,
    correct=True,
    deployed={"KERNELS": 0, "GRAPH": 2},
    note="graphs 2",
)
FAILED = Record(
    "bert-training", "training", 1, "eager", note="RuntimeError: no"
)  # fmt: skip


def test_columns_are_aligned_and_failures_explained() -> None:
    head, good, failed, note = render([GOOD, FAILED]).splitlines()
    assert good.split() == [
        "three-ops", "pygraph-cold", "0.033", "±", "0.002", "0.025", "±", "0.001", "0.023", "±", "0.001",
        "34", "6.3", "0.012", "99.1%", "yes", "GRAPH:2",
    ]  # fmt: skip
    assert head.index("step ms") + len("step ms") == good.index("±") + len("± 0.002")
    assert head.index("correct") == good.index("yes") == failed.index("-", head.index("correct"))
    assert note == "bert-training eager: RuntimeError: no"
