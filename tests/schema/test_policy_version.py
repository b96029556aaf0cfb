"""What `decide` answers is pinned for each POLICY_VERSION: no change of it goes out under the number of another rule."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pygraphd.schema import policy
from pygraphd.schema.messages import Conditions, Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
CASES = 2000
DIGESTS = {4: "735bed89d48b2c8694bddf64caffe2c13ca10d8339acbc5b7efa039c8e62f710"}
"""Of the answers of each version; one that has gone out is never changed."""


class Cases:
    """The same cases on every machine: nothing is used but a generator that Python keeps as it is, and sums and products.

    Most lie close to what today's rule asks for, so that a rule that asks for a little more or less answers some otherwise.
    """

    def __init__(self) -> None:
        self._random = random.Random(4).random

    def __iter__(self) -> Iterator[tuple[list[Measurement], Conditions]]:
        return (self._case() for _ in range(CASES))

    def _between(self, low: float, high: float) -> float:
        return round(low + (high - low) * self._random(), 6)

    def _case(self) -> tuple[list[Measurement], Conditions]:
        noise = self._between(0, 0.04) if self._random() < 0.5 else 0.0
        launch = self._measurement(KERNELS, self._between(20, 500), noise, 1.0, 0.0)
        rest = [self._candidate(each, launch, noise) for each in (TREES, GRAPH) if self._random() < 0.8]
        return [each for each in (launch, *rest) if self._random() < 0.98], self._conditions(launch)

    def _candidate(self, deployment: Deployment, launch: Measurement, noise: float) -> Measurement:
        """Return what wins by about 2 %, or by about three standard errors of the difference of eight to fourteen samples."""
        gain = noise * self._between(1.9, 3.0) if noise else self._between(0.015, 0.025)
        lost = self._between(0.2, 0.3) if self._random() < 0.5 else self._between(-1, 0)
        return self._measurement(deployment, launch.median_us * (1 - gain), noise, 1 - gain, lost * gain)

    def _measurement(
        self, deployment: Deployment, median_us: float, noise: float, host: float, lost: float
    ) -> Measurement:
        times = median_us, median_us * noise, 300 * host, 150 + 300 * lost
        median_us, mad_us, host_us, span_us = (round(each, 6) for each in times)
        samples = 7 + int(8 * self._random())
        return Measurement(deployment, samples, median_us, mad_us, host_us, span_us, 0.0)

    def _conditions(self, launch: Measurement) -> Conditions:
        backward_gain_us = self._between(0, 0.2 * launch.median_us)
        return (
            Conditions(),
            Conditions(forward_in_trees=True),
            Conditions(forward_in_trees=False),
            Conditions(backward_gain_us=backward_gain_us),
        )[int(4 * self._random())]


def answers() -> list[tuple[Deployment, str, bool, int]]:
    decisions = (policy.decide(*case) for case in Cases())
    return [(each.deployment, each.reason, each.final, each.calls) for each in decisions]


def digest() -> str:
    return hashlib.sha256(repr([(str(name), *rest) for name, *rest in answers()]).encode()).hexdigest()


def test_what_a_version_answers_is_what_it_has_always_answered() -> None:
    version, now = policy.POLICY_VERSION, digest()

    if version not in DIGESTS:
        pytest.fail(f'POLICY_VERSION is {version} now: add {version}: "{now}" to DIGESTS in this file')
    assert now == DIGESTS[version], (
        f"`decide` answers otherwise than policy {version} did, and caches would keep what that has decided: raise POLICY_VERSION "
        f'in schema/policy.py to {version + 1}, and add {version + 1}: "{now}" to DIGESTS in this file; leave what is there'
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NOISE_FACTOR", 2.8),
        ("NOISE_FACTOR", 3.05),
        ("MIN_GAIN", 0.0195),
        ("MIN_GAIN", 0.0205),
        ("MAX_LOSS", 0.245),
        ("MIN_SAMPLES", 7),
        ("MIN_SAMPLES", 9),
        ("_ERROR_OF_MEDIAN", 1.23 * 1.4826),
        ("_ERROR_OF_MEDIAN", 1.2533 * 1.46),
        ("NO_GAIN", "no gain"),
        ("FOR_ITS_BACKWARD", "for its backward"),
        ("FORWARD_NOT_IN_TREES", "for its forward"),
    ],
)
def test_a_rule_that_asks_for_a_little_more_or_less_answers_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    before = digest()
    monkeypatch.setattr(policy, name, value)

    assert digest() != before


@pytest.mark.parametrize("name", ["NOISE_FACTOR", "MIN_GAIN", "MAX_LOSS", "_ERROR_OF_MEDIAN"])
@pytest.mark.parametrize("factor", [1 - 1e-9, 1 + 1e-9])
def test_no_answer_hangs_on_the_last_digits_of_a_number(
    monkeypatch: pytest.MonkeyPatch, name: str, factor: float
) -> None:
    """Another machine, or Python, may round otherwise."""
    before = digest()
    monkeypatch.setattr(policy, name, factor * getattr(policy, name))

    assert digest() == before


def test_every_answer_that_there_is_comes_often() -> None:
    times = Counter((name, reason) for name, reason, _, _ in answers())

    assert len(times) == 6
    assert min(times.values()) >= 50
