"""What alternates is held against what does the same work with fixed addresses, in the same round."""

from __future__ import annotations

import pytest
import torch

from benchmarks.conditions import Conditions
from tools.lab import addresses
from tools.lab.addresses import (
    HELD_AGAINST,
    ROUNDS,
    SKIPPED,
    WINDOW_STEPS,
    Addresses,
    Round,
    Window,
    figures,
)

pytestmark = pytest.mark.torch


def round_of(slower: float) -> Round:
    """Return a round in a while in which all takes so many times as long."""
    return {
        name: Window(step_ms * slower, regions_us)
        for name, step_ms, regions_us in (
            ("fixed", 4.0, 300.0),
            ("four_batches_in_rotation", 4.4, 320.0),
            ("micro_batches_of_one_place", 2.0, 310.0),
            ("micro_batches_in_flight", 3.0, 300.0),
        )
    }


def test_what_slows_a_whole_round_is_not_taken_for_alternating() -> None:
    shares = figures([round_of(1), round_of(2)])["addresses_beyond_fixed"]

    assert shares["four_batches_in_rotation"] == {"median": pytest.approx(0.1), "mad": 0, "n": 2}
    assert shares["micro_batches_in_flight"]["median"] == pytest.approx(0.5)
    assert set(shares) == {"four_batches_in_rotation", "micro_batches_in_flight"}


def test_what_calls_of_regions_take_longer_is_a_share_of_a_step_with_fixed_addresses() -> None:
    found = figures([round_of(1)])

    shares = found["addresses_regions_beyond_fixed"]
    assert shares["four_batches_in_rotation"]["median"] == pytest.approx(20 / 4000)
    assert shares["micro_batches_in_flight"]["median"] == pytest.approx(-10 / 2000)
    assert found["addresses_regions_us"]["fixed"]["median"] == 300


def test_each_way_has_its_time() -> None:
    assert figures([round_of(1), round_of(2)])["addresses_ms"]["fixed"] == {"median": 6.0, "mad": 2.0, "n": 2}


def test_a_window_counts_what_regions_take_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    total_us = 0.0

    def step(_: object) -> None:
        nonlocal total_us
        total_us += 7.0

    windows = Addresses(step, [0], Conditions(), lambda: total_us)  # type: ignore[arg-type]
    rounds = windows.rounds([windows.fixed, windows.fixed_again])

    assert len(rounds) == ROUNDS
    assert {window.regions_us for each in rounds for window in each.values()} == {7.0}
    assert total_us == 7.0 * WINDOW_STEPS * 2 * (SKIPPED + ROUNDS) * (1 + addresses.UNTIMED)


def test_whatever_alternates_is_held_against_a_way_that_is_run_with_it() -> None:
    windows = Addresses.__new__(Addresses)
    ways = {way.__name__ for way in windows.ways(training=True, may_overlap=True)}

    assert set(HELD_AGAINST) < ways
    assert set(HELD_AGAINST.values()) == ways - set(HELD_AGAINST)
