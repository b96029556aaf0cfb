"""Which calls bear out what was recorded of a deployment, on the host and on the GPU."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pygraphd.client.autotune import cost
from pygraphd.client.autotune.cost import Cost
from pygraphd.schema.messages import Decision, Deployment, Entry, Measurement
from pygraphd.schema.reasons import Reason, ReasonCode

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
TIMES = st.floats(1, 1e6)
SHARES = st.floats(0, 1)
DEPLOYMENTS = st.sampled_from(Deployment)


def call(host_us: float, span_us: float, deployment: Deployment = GRAPH, busy: float = 0.0) -> Measurement:
    """Return what is seen of calls of which a share finds the GPU at work."""
    return Measurement(deployment, 8, max(host_us, span_us), 0.0, host_us, span_us, busy)


def cost_of(measured: Measurement) -> Cost:
    return Cost(measured.host_us, measured.span_us)


CALLS = st.builds(call, TIMES, TIMES, DEPLOYMENTS, SHARES)


@pytest.mark.parametrize("deployment", Deployment)
@pytest.mark.parametrize(
    ("recorded", "seen", "holds"),
    [
        ((17, 411), (17, 411), True),
        ((17, 411), (17, 4000), False),
        ((49, 50), (49, 100_000), False),
        ((17, 411), (17, 490), True),
        ((17, 411), (17, 520), False),
        ((17, 411), (13, 320), False),
        ((17, 411), (60, 411), True),
        ((17, 411), (600, 411), False),
        ((130, 18), (130, 131), True),
        ((130, 131), (130, 18), True),
        ((130, 18), (160, 160), False),
        ((130, 18), (100, 14), False),
    ],
)
def test_what_takes_longer_or_less_on_the_gpu_or_the_host_is_seen(
    recorded: tuple[float, float], seen: tuple[float, float], holds: bool, deployment: Deployment
) -> None:
    assert cost_of(call(*recorded, deployment)).holds(call(*seen, deployment)) is holds


def test_a_capture_that_takes_less_on_the_gpu_alone_is_seen() -> None:
    assert not cost_of(call(17, 411, GRAPH)).holds(call(17, 300, GRAPH))
    assert cost_of(call(17, 411, KERNELS)).holds(call(17, 300, KERNELS)), "the host may have spaced it out"


def test_a_call_that_waits_in_a_full_queue_is_no_slower() -> None:
    recorded = cost_of(call(17, 411, busy=1.0))

    assert recorded.holds(call(3000, 411, busy=1.0))
    assert not recorded.holds(call(3000, 411))


@given(TIMES, TIMES, SHARES, DEPLOYMENTS, SHARES)
def test_how_much_is_hidden_is_no_reason_to_doubt(
    host_us: float, gpu_us: float, before: float, deployment: Deployment, some: float
) -> None:
    """On an idle GPU the span begins before the host has queued anything: `before` is the share of its time that this takes."""
    shown_us = max(host_us, gpu_us) if deployment is KERNELS else gpu_us + before * host_us
    shown = call(host_us, shown_us, deployment)
    hidden = call(host_us, gpu_us, deployment, busy=1.0)
    mixed = call(host_us, gpu_us + some * (shown_us - gpu_us), deployment, busy=some)

    for recorded in (shown, hidden, mixed):
        for seen in (shown, hidden, mixed):
            assert cost_of(recorded).holds(seen)


@given(CALLS)
def test_what_was_measured_itself_holds(measured: Measurement) -> None:
    assert cost_of(measured).holds(measured)


@given(TIMES, TIMES, TIMES, TIMES, SHARES, SHARES, DEPLOYMENTS)
def test_if_a_call_holds_so_does_what_is_between_it_and_what_was_measured(
    host_us: float,
    span_us: float,
    other_host_us: float,
    other_span_us: float,
    host_way: float,
    span_way: float,
    deployment: Deployment,
) -> None:
    recorded = cost_of(call(host_us, span_us, deployment))
    assume(recorded.holds(call(other_host_us, other_span_us, deployment)))

    nearer = call(
        host_us + host_way * (other_host_us - host_us),
        span_us + span_way * (other_span_us - span_us),
        deployment,
    )

    assert recorded.holds(nearer)


@given(TIMES, TIMES, TIMES, DEPLOYMENTS, SHARES)
def test_no_slowdown_of_the_gpu_beyond_both_parts_goes_unseen(
    host_us: float, span_us: float, more_us: float, deployment: Deployment, hidden: float
) -> None:
    slow_us = 1.21 * (host_us + span_us) + more_us

    assert not cost_of(call(host_us, span_us, deployment)).holds(call(host_us, slow_us, deployment, hidden))


@given(CALLS, st.floats(0, 0.79))
def test_what_takes_less_on_both_is_seen(measured: Measurement, factor: float) -> None:
    seen = call(measured.host_us * factor, measured.span_us * factor, measured.deployment)

    assert not cost_of(measured).holds(seen)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"cost_us": 50.0}, None),
        ({"cost_us": 50.0, "host_us": 17.0}, None),
        ({"cost_us": 50.0, "host_us": 17.0, "span_us": 49.0}, Cost(17.0, 49.0)),
    ],
    ids=["a rule", "an older daemon", "one part", "both parts"],
)
def test_an_entry_says_what_a_call_costs(said: dict[str, float], expected: Cost | None) -> None:
    entry = Entry("a" * 64, Decision(GRAPH, Reason(ReasonCode.OTHER), 1), **said)  # type: ignore[arg-type]

    assert cost.of_entry(entry) == expected
