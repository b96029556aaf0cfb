"""The reason that is given is the policy's own, with its thresholds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.rejections import NOT_BY_FIGURES, NOT_MEASURED, why_rejected
from pygraphd.schema.messages import Deployment, Measurement
from pygraphd.schema.policy import wins

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH


def measured(deployment: Deployment, median: float, mad: float = 0.0, samples: int = 8) -> Measurement:
    return Measurement(deployment, samples, median, mad, median, median, 0.0)


def why(rejected: Deployment, chosen: Deployment, *measurements: Measurement) -> str:
    return why_rejected(rejected, chosen, {each.deployment: each for each in measurements})


@pytest.mark.parametrize(
    ("trees", "reason"),
    [
        (measured(TREES, 112), "slower by 12 %"),
        (measured(TREES, 100.04), "slower by 0.04 %"),
        (measured(TREES, 100), "as fast as KERNELS"),
        (measured(TREES, 98.9), "faster by 1.1 %, less than the 2 % that a capture must win by"),
        (measured(TREES, 98.04), "faster by 1.96 %, less than the 2 % that a capture must win by"),
        (measured(TREES, 97, mad=2.537), "faster by 3 %, within the noise of ±5 %"),
        (measured(TREES, 99, mad=2.537), "faster by 1 %, within the noise of ±5 %"),
        (measured(TREES, 50), f"faster by 50 %; {NOT_BY_FIGURES}"),
        (measured(TREES, 1, samples=5), "too few samples (5 of 8)"),
    ],
)
def test_what_lost_against_launching_says_by_how_much(trees: Measurement, reason: str) -> None:
    assert why(TREES, KERNELS, trees, measured(KERNELS, 100)) == reason


@pytest.mark.parametrize(
    ("deployment", "reason"),
    [
        (KERNELS, "slower by 67 %"),
        (GRAPH, f"faster by 10 %; {NOT_BY_FIGURES}"),
    ],
)
def test_what_lost_against_a_capture_is_compared_with_that(deployment: Deployment, reason: str) -> None:
    figures = measured(KERNELS, 100), measured(TREES, 60), measured(GRAPH, 54)

    assert why(deployment, TREES, *figures) == reason


def test_what_was_not_measured_is_compared_with_nothing() -> None:
    few = measured(KERNELS, 100, samples=3)

    assert why(GRAPH, KERNELS, few) == NOT_MEASURED
    assert why(TREES, KERNELS, measured(TREES, 50)) == "nothing to compare it with (KERNELS: not measured)"
    assert (
        why(TREES, KERNELS, measured(TREES, 50), few)
        == "nothing to compare it with (KERNELS: too few samples (3 of 8))"
    )


def test_a_call_that_took_no_time_divides_nothing() -> None:
    assert why(TREES, KERNELS, measured(TREES, 5), measured(KERNELS, 0)) == "slower by over 1000 %"
    assert why(TREES, KERNELS, measured(TREES, 0), measured(KERNELS, 0)) == "as fast as KERNELS"


FIGURES = st.floats(0.1, 1e6), st.floats(0, 1e5), st.integers(8, 40)


@given(st.builds(measured, st.just(KERNELS), *FIGURES), st.builds(measured, st.just(TREES), *FIGURES))
def test_the_figures_are_blamed_exactly_where_the_policy_blames_them(
    launch: Measurement, trees: Measurement
) -> None:
    reason = why(TREES, KERNELS, launch, trees)

    assert wins(trees, launch) is reason.endswith(NOT_BY_FIGURES)
    assert reason.startswith("slower") <= (trees.median_us > launch.median_us)
    assert reason.startswith("faster") <= (trees.median_us < launch.median_us)
