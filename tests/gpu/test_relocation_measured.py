"""Relocatable graphs as one of the deployments that are measured, decided and remembered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import session
from pygraphd.client.relocatable import NOT_YET

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.conftest import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ENOUGH = 60


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(session.RELOCATE_VARIABLE, "1")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).cuda()


def train(run: Callable[..., Any], parameters: list[torch.nn.Parameter]) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    data = torch.Generator("cuda").manual_seed(1)
    seen = []
    for _ in range(ENOUGH):
        x = torch.randn(32, 64, device="cuda", generator=data)
        loss = (run(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append(loss.item())
    return seen


def test_all_three_are_measured_and_the_result_is_right(watched: Watched) -> None:
    mine, plain = network(), network()

    losses = train(torch.compile(mine, mode="reduce-overhead"), list(mine.parameters()))

    torch.testing.assert_close(losses, train(plain, list(plain.parameters())), rtol=1e-3, atol=1e-4)
    watched.expect(graphs=2, measured=2, captured=2)
    requests = [json.loads(file.read_text()) for file in watched.spool.glob("*.json")]
    records = [record for request in requests for record in request["records"]]
    for record in records:
        assert {each["deployment"] for each in record["measurements"]} == {"LAUNCH", "TREES", "RELOCATE"}
    print(json.dumps(records, indent=1))  # noqa: T201 - what was measured, for whoever runs this


def test_what_is_deployed_stays_right(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relocatable graphs win whatever is measured."""
    from pygraphd.client import policy
    from pygraphd.schema.messages import Decision, Deployment

    chosen = Decision(Deployment.RELOCATE, "for a test", policy.POLICY_VERSION)
    monkeypatch.setattr(policy, "decide", lambda _measurements: chosen)
    mine = network()
    run = torch.compile(mine, mode="reduce-overhead")
    train(run, list(mine.parameters()))
    assert watched.deployed() == {"RELOCATE": 2}

    kept = []
    for i in range(20):
        x = torch.full((32, 64), i / 10, device="cuda")
        kept.append((x, run(x).detach()))

    for x, result in kept:
        torch.testing.assert_close(result, mine(x), rtol=1e-3, atol=1e-4)
    assert set(watched.report.fallbacks) <= {NOT_YET}
