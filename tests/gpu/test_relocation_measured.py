"""Recordings graphs as one of the deployments that are measured, decided and remembered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.recording.recordings import NOT_YET, Recordings
from pygraphd.client.recording.size_slot import Persistence, Refusal, SizeSlot

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.watched import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ENOUGH = 160
"""Steps that end measuring, also where samples are noisy: up to 76 of them are timed."""


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


def recorded(watched: Watched) -> list[dict[str, Any]]:
    """Return what was measured and decided of each graph."""
    requests = [json.loads(file.read_text()) for file in watched.spool.glob("*.json")]
    records = [record for request in requests for record in request["records"]]
    print(json.dumps(records, indent=1))  # noqa: T201 - what was measured, for whoever runs this
    return records


def test_both_are_measured_and_the_result_is_right(watched: Watched) -> None:
    mine, plain = network(), network()

    losses = train(torch.compile(mine, mode="reduce-overhead"), list(mine.parameters()))

    torch.testing.assert_close(losses, train(plain, list(plain.parameters())), rtol=1e-3, atol=1e-4)
    watched.expect(graphs=2, measured=2, captured=2)
    measured = {each["deployment"] for record in recorded(watched) for each in record["measurements"]}
    assert measured == {"KERNELS", "GRAPH"}


@pytest.mark.usefixtures("graphs_win")
def test_a_forward_is_recorded_beside_a_backward_that_cannot_be(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recordings._record

    def refusing(one: Recordings, slot: SizeSlot, inputs: list[Any]) -> Any:
        if torch._C._current_graph_task_id() != -1:  # autograd has called it
            one._refuse(slot, Refusal("refused for a test", Persistence.PERMANENT))
            return one._run_kernels(inputs)
        return record(one, slot, inputs)

    monkeypatch.setattr(Recordings, "_record", refusing)
    mine, plain = network(), network()

    losses = train(torch.compile(mine, mode="reduce-overhead"), list(mine.parameters()))

    torch.testing.assert_close(losses, train(plain, list(plain.parameters())), rtol=1e-3, atol=1e-4)
    watched.expect(graphs=2, captured=1)
    assert watched.deployed() == {"GRAPH": 1, "KERNELS": 1}


@pytest.mark.usefixtures("graphs_win")
def test_what_is_deployed_stays_right(watched: Watched) -> None:
    mine = network()
    run = torch.compile(mine, mode="reduce-overhead")
    train(run, list(mine.parameters()))
    assert watched.deployed() == {"GRAPH": 2}

    kept = []
    for i in range(20):
        x = torch.full((32, 64), i / 10, device="cuda")
        kept.append((x, run(x).detach()))

    for x, result in kept:
        torch.testing.assert_close(result, mine(x), rtol=1e-3, atol=1e-4)
    assert set(watched.report.fallbacks) <= {NOT_YET}


def test_plain_compile_gets_graphs_of_its_own_and_every_result_is_the_users(watched: Watched) -> None:
    """Without a mode: two results in a row, a cache that is changed in place, training; nothing of it is overwritten."""
    mine, plain = network(), network()
    run = torch.compile(mine)

    losses = train(run, list(mine.parameters()))

    torch.testing.assert_close(losses, train(plain, list(plain.parameters())), rtol=1e-3, atol=1e-4)
    watched.expect(graphs=2, measured=2, captured=2)
    kept = [(x, run(x).detach()) for x in (torch.full((32, 64), i / 10, device="cuda") for i in range(20))]
    for x, result in kept:
        torch.testing.assert_close(result, mine(x), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("graphs_win")
def test_a_cache_that_is_changed_in_place_is_relocated_without_a_mode(watched: Watched) -> None:
    def step(cache: torch.Tensor, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, x)
        for _ in range(12):
            x = torch.softmax(x @ cache.T, -1) @ cache
        return x

    mine, plain = torch.zeros(64, 32, device="cuda"), torch.zeros(64, 32, device="cuda")
    run = torch.compile(step, dynamic=False)
    with torch.no_grad():
        for i in range(60):
            x, position = torch.randn(1, 32, device="cuda"), torch.tensor([i], device="cuda")
            torch.testing.assert_close(run(mine, x, position), step(plain, x, position), rtol=1e-3, atol=1e-4)

    torch.testing.assert_close(mine, plain)
    watched.expect(graphs=1, measured=1, captured=1)
    assert watched.deployed() == {"GRAPH": 1}


def test_what_a_graph_reads_on_the_host_runs_between_graphs(watched: Watched) -> None:
    """A capture must not wait for the GPU, as `nonzero` has the host do: the rest is recorded."""
    compiled = torch.compile(lambda x: x[x > 0].sum() + torch.rand_like(x).sum() * 0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        for _ in range(60):  # the sizes between the graphs come back in more calls
            x = torch.randn(1000, device="cuda")
            torch.testing.assert_close(compiled(x), x[x > 0].sum())

    watched.expect(captured=1)
