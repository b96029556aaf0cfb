"""What `decide` answers is pinned for each POLICY_VERSION: no change of it goes out under the number of another rule."""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
CASES = 4000
DIGESTS = {
    5: "b9c29c83d56d8069d5663e07929b91843a15f909bced0c5d933146c762205aca",
    6: "d631a84050a1b6317b075308b72616d7291abc99a1dd2695e87550bfe472b195",
}
"""Of the answers of each version since GRAPH and KERNELS are all that there is; one that has gone out is never changed."""

Times = tuple[float, float, float]
"""The host's, the GPU's, and the interval, in microseconds."""


class Cases:
    """The same cases on every machine: nothing is used but a generator that Python keeps as it is, and sums and products.

    Most lie close to what today's rule asks for, so that a rule that asks for a little more or less answers some otherwise.
    """

    def __init__(self) -> None:
        self._random = random.Random(5).random

    def __iter__(self) -> Iterator[list[Measurement]]:
        return (self._case() for _ in range(CASES))

    def _between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random()

    def _around(self, *values: float) -> float:
        """Return something close to one of some values."""
        return values[int(len(values) * self._random())] * self._between(0.95, 1.05)

    def _case(self) -> list[Measurement]:
        kernels = self._between(100, 500), self._between(50, 500), self._between(500, 900)
        noises = self._noise(), self._noise(), self._noise()
        # Three standard errors of the difference of eight to fourteen samples each are 2.1 to 2.8 times the noise.
        edges = [max(0.02, self._between(2.1, 2.8) * noise) for noise in noises]
        host = 1 + self._around(-0.5, -0.02, -edges[0], edges[0], 0)
        saved = max(0.0, 1 - host) * kernels[0] / kernels[1]
        span = 1 + self._around(0, edges[1], -edges[1], 0.1 * saved, 0.4)
        interval = 1 + self._around(0, -edges[2], -0.02, -0.1, 0.1)
        graph = kernels[0] * host, kernels[1] * span, kernels[2] * interval
        measured = [self._measured(GRAPH, graph, noises), self._measured(KERNELS, kernels, noises)]
        return [each for each in measured if self._random() < 0.99]

    def _noise(self) -> float:
        return self._around(0.003, 0.0075, 0.04, 0.06, 0.3) if self._random() < 0.5 else 0.0

    def _measured(self, deployment: Deployment, times: Times, noises: Times) -> Measurement:
        host_us, span_us, median_us = (round(each, 6) for each in times)
        host_mad, span_mad, mad = (round(noise * each, 6) for noise, each in zip(noises, times, strict=True))
        samples = 7 + int(8 * self._random()) if self._random() < 0.6 else 8
        spreads = (None, None) if self._random() < 0.1 else (host_mad, span_mad)
        return Measurement(deployment, samples, median_us, mad, host_us, span_us, 0.0, *spreads)


@functools.cache
def cases() -> tuple[list[Measurement], ...]:
    return tuple(Cases())


def answers() -> list[tuple[Deployment, str, bool, int]]:
    decisions = (policy.decide(case) for case in cases())
    return [(each.deployment, each.reason.code.value, each.final, each.calls) for each in decisions]


def digest() -> str:
    return hashlib.sha256(repr([(str(name), *rest) for name, *rest in answers()]).encode()).hexdigest()


@pytest.fixture(scope="module")
def of_today() -> str:
    """Return the digest of what the rule answers as it is."""
    return digest()


def test_what_a_version_answers_is_what_it_has_always_answered(of_today: str) -> None:
    version, now = policy.POLICY_VERSION, of_today

    if version not in DIGESTS:
        pytest.fail(f'POLICY_VERSION is {version} now: add {version}: "{now}" to DIGESTS in this file')
    assert now == DIGESTS[version], (
        f"`decide` answers otherwise than policy {version} did, and caches would keep what that has decided: raise POLICY_VERSION "
        f'in schema/policy.py to {version + 1}, and add {version + 1}: "{now}" to DIGESTS in this file; leave what is there'
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NOISE_FACTOR", 2.95),
        ("NOISE_FACTOR", 3.05),
        ("MIN_GAIN", 0.0195),
        ("MIN_GAIN", 0.0205),
        ("MAX_LOSS", 0.098),
        ("MAX_LOSS", 0.102),
        ("MAX_DOUBT", 0.098),
        ("MAX_DOUBT", 0.102),
        ("MIN_SAMPLES", 7),
        ("MIN_SAMPLES", 9),
        ("_ERROR_OF_MEDIAN", 1.23 * 1.4826),
        ("_ERROR_OF_MEDIAN", 1.2533 * 1.46),
    ],
)
def test_a_rule_that_asks_for_a_little_more_or_less_answers_otherwise(
    monkeypatch: pytest.MonkeyPatch, of_today: str, name: str, value: object
) -> None:
    monkeypatch.setattr(policy, name, value)

    assert digest() != of_today


@pytest.mark.parametrize("name", ["NOISE_FACTOR", "MIN_GAIN", "MAX_LOSS", "MAX_DOUBT", "_ERROR_OF_MEDIAN"])
@pytest.mark.parametrize("factor", [1 - 1e-9, 1 + 1e-9])
def test_no_answer_hangs_on_the_last_digits_of_a_number(
    monkeypatch: pytest.MonkeyPatch, of_today: str, name: str, factor: float
) -> None:
    """Another machine, or Python, may round otherwise."""
    monkeypatch.setattr(policy, name, factor * getattr(policy, name))

    assert digest() == of_today


def test_every_answer_that_there_is_comes() -> None:
    times = Counter((name, code, final) for name, code, final, _ in answers())

    assert len(times) == 12, times
    assert min(times.values()) >= 4, times
