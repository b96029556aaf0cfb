"""Captured graphs that are launched now and then, to hold them against that: results stay right, and nothing is recorded for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import checking, options, policy, retrials
from pygraphd.client.costs import Cost
from pygraphd.schema.messages import Conditions, Decision, Deployment, Measurement
from tests.gpu.test_measuring import DEVICE, model, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.gpu.conftest import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ENOUGH = 60
LOOKS = 4
STEPS = 40
"""That end a look."""


def recordings() -> int:
    """Return how many graphs PyTorch's trees have recorded, and one more for each time that this is asked."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(0, create_if_none_exists=False)
    return 0 if manager is None else int(manager.new_graph_id().id)


class Trained:
    """A model that is trained in pieces, beside the same one without us."""

    def __init__(self, mode: str) -> None:
        self.module, self.steps = model(), 0
        self.run: Callable[..., Any] = torch.compile(self.module, mode=mode)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        self._data = torch.Generator(DEVICE).manual_seed(1)
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        """Take some more steps, as `test_measuring.train` does from the first on."""
        for _ in range(steps):
            x = torch.randn(32, 64, device=DEVICE, generator=self._data)
            loss = (self.run(x) - x[:, :8]).square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.item())

    def expect_right(self) -> None:
        torch.testing.assert_close(self.losses, reference(len(self.losses)), rtol=2e-3, atol=1e-4)


def force(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> None:
    def decide(measurements: Sequence[Measurement], conditions: Conditions) -> Decision:
        return Decision(deployment, "forced", 0)

    monkeypatch.setattr("pygraphd.client.region.decide", decide)


@pytest.fixture(params=[Deployment.TREES, Deployment.GRAPH], ids=str)
def trained(request: pytest.FixtureRequest, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Return a model that is trained, all of it in one way."""
    if request.param is Deployment.TREES:
        monkeypatch.setenv(options.RELOCATE, "0")
        watched.session.options = options.read({options.RELOCATE: "0"})
    force(monkeypatch, request.param)
    # Times are the machine's, and may be another program's, too.
    monkeypatch.setattr(Cost, "holds", lambda self, seen: True)
    monkeypatch.setattr("pygraphd.client.looking.is_overtaken", lambda *_: False)
    made = Trained("reduce-overhead")
    made.train(ENOUGH)
    assert watched.deployed() == {str(request.param): 2}
    return made


def test_training_is_right_while_it_is_looked_at_and_nothing_is_recorded(
    trained: Trained, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = 0
    launch = checking.Checked._timed

    def timed(self: Any, deployment: Deployment, *rest: Any) -> Any:
        nonlocal launched
        launched += deployment is Deployment.KERNELS
        return launch(self, deployment, *rest)

    monkeypatch.setattr(checking.Checked, "_timed", timed)
    captured, recorded = watched.report.counts["captured"], recordings()
    for _ in range(LOOKS):
        watched.session.drift.look()
        trained.train(STEPS)

    trained.expect_right()
    watched.expect(rechecked=2 * LOOKS, drifted=0, measured=2, captured=captured)
    assert recordings() == recorded + (recorded > 0)
    assert 2 * LOOKS * 8 <= launched <= 2 * LOOKS * 16
    assert watched.report.checking_ms > 0


def test_what_is_overtaken_is_measured_anew_and_right(
    trained: Trained, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.client.looking.is_overtaken", lambda *_: True)
    force(monkeypatch, Deployment.KERNELS)
    watched.session.drift.look()

    trained.train(4 * STEPS)

    trained.expect_right()
    watched.expect(rechecked=2, drifted=2, measured=4)
    assert watched.deployed() == {"KERNELS": 2}
    assert watched.report.fallbacks[checking.OVERTAKEN] == 2


@pytest.fixture
def launched(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Return a model that is trained, all of it launched, just before its turn to be measured anew."""
    force(monkeypatch, Deployment.KERNELS)
    monkeypatch.setattr(Cost, "holds", lambda self, seen: True)
    monkeypatch.setattr(retrials, "SHARE", 1e9)  # tests have not run for an hour
    monkeypatch.setattr(retrials, "stagger", lambda: 0)
    made = Trained("reduce-overhead")
    made.train(ENOUGH)
    for _ in range(retrials.FIRST - 1):
        watched.session.drift.look()
        made.train(STEPS)
    watched.expect(rechecked=2 * (retrials.FIRST - 1), drifted=0, retried=0, measured=2)
    assert watched.deployed() == {"KERNELS": 2}
    return made


@pytest.mark.parametrize("best", [Deployment.GRAPH, Deployment.TREES, Deployment.KERNELS])
def test_what_is_launched_is_recorded_and_measured_anew_in_its_turn_and_right(
    launched: Trained, watched: Watched, monkeypatch: pytest.MonkeyPatch, best: Deployment
) -> None:
    captured = watched.report.counts["captured"]
    force(monkeypatch, best)
    watched.session.drift.look()

    launched.train(4 * STEPS)

    launched.expect_right()
    watched.expect(rechecked=2 * retrials.FIRST, drifted=0, retried=2, measured=4)
    assert watched.deployed() == {str(best): 2}
    assert watched.report.counts["captured"] > captured
    assert watched.report.fallbacks[checking.RETRIED] == 2
    assert policy.UNBEATEN not in watched.reasons()


WIDE, ROWS = 1024, 65_536


def test_the_memory_that_is_recorded_in_is_given_back_if_launches_stay(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, Deployment.KERNELS)
    monkeypatch.setattr(Cost, "holds", lambda self, seen: True)
    monkeypatch.setattr(retrials, "SHARE", 1e9)
    monkeypatch.setattr(retrials, "stagger", lambda: 0)
    layers = [torch.nn.Linear(WIDE, WIDE, device=DEVICE) for _ in range(3)]
    compiled = torch.compile(torch.nn.Sequential(*layers), mode="reduce-overhead")
    x = torch.randn(ROWS, WIDE, device=DEVICE)

    def call(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                compiled(x)
                torch.cuda.synchronize()

    call(ENOUGH)
    watched.expect(measured=1)
    torch.cuda.empty_cache()
    for _ in range(retrials.FIRST - 1):
        watched.session.drift.look()
        call(STEPS)
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    watched.session.drift.look()

    call(3 * STEPS)

    watched.expect(retried=1, measured=2)
    assert watched.deployed() == {"KERNELS": 1}
    assert torch.cuda.max_memory_reserved() - before >= 2 * ROWS * WIDE * 4, "else nothing is shown here"
    assert torch.cuda.memory_reserved() - before <= 64 << 20
