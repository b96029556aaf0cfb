"""When trees need not be tried: only where relocatable graphs have won, and by their host time or bound by the GPU."""

from __future__ import annotations

import pytest

from pygraphd.client.policy import spares_trees
from pygraphd.schema.messages import Deployment, Measurement
from pygraphd.schema.policy import MIN_SAMPLES

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH


def measured(
    deployment: Deployment, host_us: float, span_us: float, samples: int = MIN_SAMPLES
) -> Measurement:
    return Measurement(deployment, samples, max(host_us, span_us), 0.0, host_us, span_us, 0.0)


@pytest.mark.parametrize(
    ("relocated", "spares"),
    [
        ((30.0, 10.0), True),
        ((50.0, 10.0), True),
        ((51.0, 10.0), False),  # trees may take less on the host
        ((70.0, 80.0), True),  # on the GPU they take no less
        ((99.0, 10.0), False),  # no gain over KERNELS
        ((200.0, 10.0), False),
    ],
)
def test_trees_are_spared_where_they_cannot_win(relocated: tuple[float, float], spares: bool) -> None:
    both = [measured(KERNELS, 100.0, 80.0), measured(GRAPH, *relocated)]

    assert spares_trees(both) is spares
    assert spares_trees([*both, measured(TREES, 1.0, 1.0)]) is spares, "few samples of theirs say nothing yet"


def test_they_are_not_where_too_little_is_known() -> None:
    assert not spares_trees([])
    assert not spares_trees([measured(KERNELS, 100.0, 10.0)])
    assert not spares_trees([measured(KERNELS, 100.0, 10.0), measured(GRAPH, 9.0, 9.0, MIN_SAMPLES - 1)])
