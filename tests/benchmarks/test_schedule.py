from __future__ import annotations

from benchmarks.schedule import turns
from benchmarks.variants import select_variants
from benchmarks.workloads import select_workloads

WORKLOADS = select_workloads(["three-ops", "mlp-training"])
VARIANTS = select_variants(["eager", "default", "pygraph-warm"])


def order(repetition: int) -> list[tuple[str, str]]:
    return [(turn.workload.name, turn.variant.name) for turn in turns(repetition, WORKLOADS, VARIANTS)]


def test_first_repetition_is_in_the_order_asked_for() -> None:
    assert order(0) == [
        ("three-ops", "eager"),
        ("three-ops", "default"),
        ("three-ops", "pygraph-warm"),
        ("mlp-training", "eager"),
        ("mlp-training", "default"),
        ("mlp-training", "pygraph-warm"),
    ]


def test_every_other_repetition_reverses_the_peers_alone() -> None:
    assert [name for name, _ in order(1)] == [name for name, _ in order(0)]
    assert [variant for _, variant in order(1)] == ["pygraph-warm", "default", "eager"] * 2
    assert order(2) == order(0)


def test_turns_know_their_repetition() -> None:
    assert {turn.repetition for turn in turns(4, WORKLOADS, VARIANTS)} == {4}


def test_peers_that_run_once_are_left_out_later() -> None:
    first, *others = VARIANTS

    assert {turn.variant for turn in turns(0, WORKLOADS, VARIANTS, [first])} == set(VARIANTS)
    assert {turn.variant for turn in turns(1, WORKLOADS, VARIANTS, [first])} == set(others)
