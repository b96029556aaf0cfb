"""What alternates is held against what does the same work with fixed addresses, in the same round."""

from __future__ import annotations

import pytest

from benchmarks.addresses import HELD_AGAINST, Addresses, beyond_fixed, step_ms

pytestmark = pytest.mark.torch
ROUNDS = [
    {
        "fixed": 4.0,
        "four_batches_in_rotation": 4.4,
        "micro_batches_of_one_place": 2.0,
        "micro_batches_in_flight": 3.0,
    },
    {
        "fixed": 8.0,  # a slow while, for all of them
        "four_batches_in_rotation": 8.8,
        "micro_batches_of_one_place": 4.0,
        "micro_batches_in_flight": 6.0,
    },
]


def test_what_slows_a_whole_round_is_not_taken_for_alternating() -> None:
    shares = beyond_fixed(ROUNDS)

    assert shares["four_batches_in_rotation"] == {"median": pytest.approx(0.1), "mad": 0, "n": 2}
    assert shares["micro_batches_in_flight"]["median"] == pytest.approx(0.5)
    assert set(shares) == {"four_batches_in_rotation", "micro_batches_in_flight"}


def test_each_way_has_its_time() -> None:
    assert step_ms(ROUNDS)["fixed"] == {"median": 6.0, "mad": 2.0, "n": 2}


def test_whatever_alternates_is_held_against_a_way_that_is_run_with_it() -> None:
    addresses = Addresses.__new__(Addresses)
    ways = {way.__name__ for way in addresses.ways(training=True, may_overlap=True)}

    assert set(HELD_AGAINST) < ways
    assert set(HELD_AGAINST.values()) == ways - set(HELD_AGAINST)
