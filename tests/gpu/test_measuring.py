"""GRAPH and KERNELS, measured on real calls of real graphs, and deployed; results held against no hook at all."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend.errors import IN_A_CAPTURE
from pygraphd.client.dispatch import shapes
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.runtime import SWITCHED_OFF
from pygraphd.client.recording import recordings
from pygraphd.schema import policy
from pygraphd.schema.messages import Decision, Deployment, Measurement
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.support.watched import Watched

# PyTorch's own warnings depend on the machine; ours would be counted as failures.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
ENOUGH = 120
"""Calls that end measuring: warm-up, two dozen timed calls, and some for events that are read later."""


def model(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(6)
        for layer in (
            torch.nn.Linear(64, 64),
            torch.nn.GELU(),
            torch.nn.Dropout(dropout),
            torch.nn.LayerNorm(64),
        )
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).to(DEVICE)


def train(compiled: Callable[..., Any], parameters: list[torch.nn.Parameter], steps: int) -> list[float]:
    """Return the losses of some steps on data that is new in each."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    data = torch.Generator(DEVICE).manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 64, device=DEVICE, generator=data)
        loss = (compiled(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def reference(steps: int) -> list[float]:
    plain = model()
    return train(plain, list(plain.parameters()), steps)


def test_training_is_measured_decided_and_right(watched: Watched) -> None:
    module = model()

    losses = train(torch.compile(module, mode="reduce-overhead"), list(module.parameters()), ENOUGH)

    watched.expect(graphs=2, looked_up=2, hits=0, misses=2, measured=2, spooled=2)
    assert sum(watched.deployed().values()) == 2
    torch.testing.assert_close(losses, reference(ENOUGH), rtol=1e-3, atol=1e-4)
    assert watched.report.measuring_ms > 0


def test_small_kernels_in_a_row_are_captured(watched: Watched) -> None:
    """If measuring means anything, 200 tiny kernels that cannot be fused are faster as one graph, on a busy machine, too."""
    weights = [torch.randn(64, 64, device=DEVICE) / 8 for _ in range(200)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x @ weight
        return x

    compiled = torch.compile(chain, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(ENOUGH):
            x = torch.randn(64, 64, device=DEVICE)
            torch.testing.assert_close(compiled(x), chain(x), rtol=1e-3, atol=1e-3)

    watched.expect(graphs=1, measured=1)
    assert watched.deployed() == {"GRAPH": 1}


def test_large_inputs_that_move_cost_a_graph_nothing(watched: Watched) -> None:
    """It is told their addresses, and copies none of them."""
    compiled = torch.compile(lambda x: x.sum(), mode="reduce-overhead")
    inputs = [torch.ones(64 << 20, device=DEVICE) for _ in range(3)]
    with torch.no_grad():
        for step in range(ENOUGH):
            assert compiled(inputs[step % 3]).item() == 64 << 20

    watched.expect(graphs=1, measured=1, captured=1)


def force(monkeypatch: pytest.MonkeyPatch, *deployments: Deployment) -> None:
    """Decide in turn for the given deployments, whatever was measured."""
    left = list(deployments)

    def decide(measurements: Sequence[Measurement]) -> Decision:
        assert {m.deployment for m in measurements} == {Deployment.KERNELS, Deployment.GRAPH}
        assert all(m.samples >= policy.MIN_SAMPLES for m in measurements)
        return Decision(left.pop(0), Reason(ReasonCode.OTHER, "forced"), policy.POLICY_VERSION)

    monkeypatch.setattr("pygraphd.client.autotune.partition_trial.decide", decide)


@pytest.mark.parametrize("forward", [Deployment.KERNELS, Deployment.GRAPH])
@pytest.mark.parametrize("backward", [Deployment.KERNELS, Deployment.GRAPH])
def test_every_mixture_of_forward_and_backward_is_right(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, forward: Deployment, backward: Deployment
) -> None:
    force(monkeypatch, forward, backward)
    module = model()

    losses = train(torch.compile(module, mode="reduce-overhead"), list(module.parameters()), 2 * ENOUGH)

    watched.expect(measured=2)
    assert watched.deployed().get("GRAPH", 0) == [forward, backward].count(Deployment.GRAPH)
    torch.testing.assert_close(losses, reference(2 * ENOUGH), rtol=2e-3, atol=1e-4)


def test_a_second_process_hits_what_the_first_decided(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one process: the entries that were recorded are handed to a second session, which measures nothing.

    They are handed over as final: on a noisy machine they may be provisional, and are then measured anew.
    """
    from pygraphd.client.decisions import cache
    from pygraphd.schema import messages

    module = model()
    train(torch.compile(module, mode="reduce-overhead"), list(module.parameters()), ENOUGH)
    requests = [
        messages.decode(messages.RecordRequest, file.read_bytes())
        for file in (tmp_path / "spool").glob("*.json")
    ]
    known = {
        record.graph.digest: messages.Entry(record.graph.digest, replace(record.decision, final=True))
        for request in requests
        for record in request.records
    }
    assert len(known) == 2
    monkeypatch.setattr(cache.Cache, "lookup", lambda self, environment, graphs: known)
    torch._dynamo.reset()
    watched.report.counts.clear()
    module = model()

    losses = train(torch.compile(module, mode="reduce-overhead"), list(module.parameters()), ENOUGH)

    watched.expect(graphs=2, hits=2, misses=0, measured=0, recorded=0, spooled=0)
    torch.testing.assert_close(losses, reference(ENOUGH), rtol=1e-3, atol=1e-4)


def test_where_nothing_is_to_be_recorded_inductor_does_what_it_does_without_us(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched.session, "options", settings.read({settings.RELOCATE: "0"}))
    module = model()

    losses = train(torch.compile(module, mode="reduce-overhead"), list(module.parameters()), 10)

    watched.expect(graphs=0, measured=0)
    assert watched.report.summary()["left_to_torch"] == {SWITCHED_OFF: 2}
    torch.testing.assert_close(losses, reference(10), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_gradients_of_micro_batches_add_up(watched: Watched, mode: str | None) -> None:
    """Two forwards, then two backwards, and one after the other, while graphs are measured and when they are decided."""
    mine, plain = model(), model()
    run = torch.compile(mine, mode=mode)
    data = torch.Generator(DEVICE).manual_seed(2)
    for step in range(2 * ENOUGH):
        batches = [torch.randn(32, 64, device=DEVICE, generator=data) for _ in range(3)]
        for each in (run, plain):
            first, second = each(batches[0]).square().mean(), each(batches[1]).square().mean()
            (first if step % 2 else second).backward()
            (second if step % 2 else first).backward()
            each(batches[2]).square().mean().backward()
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
            one.grad = other.grad = None

    watched.expect(graphs=2, measured=2)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_training_in_threads_is_right(watched: Watched, mode: str | None) -> None:
    """Each thread runs forwards and backwards of its own, the compilation included; then one runs the other's backward."""
    mine, plain = model(), model()
    run = torch.compile(mine, mode=mode)
    failures: list[BaseException] = []

    def steps(count: int) -> None:
        try:
            for _ in range(count):
                x = torch.randn(32, 64, device=DEVICE)
                torch.autograd.grad(run(x).square().mean(), list(mine.parameters()))
        except BaseException as error:  # noqa: BLE001 - it is asserted that there is none
            failures.append(error)

    for _ in range(3):
        thread = threading.Thread(target=steps, args=(ENOUGH,))
        thread.start()
        thread.join()
    x = torch.randn(32, 64, device=DEVICE)
    loss = run(x).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    plain(x).square().mean().backward()

    assert failures == []
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_max_autotune_is_measured_too(watched: Watched) -> None:
    compiled = torch.compile(
        lambda x: torch.softmax(x, -1).cumsum(-1),
        options={"triton.cudagraphs": True, "max_autotune_pointwise": True},
    )
    with torch.no_grad():
        for _ in range(ENOUGH):
            compiled(torch.randn(8, 64, device=DEVICE))

    watched.expect(graphs=1, measured=1)


def test_too_few_calls_are_recorded_as_such(watched: Watched) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(10):
            compiled(torch.randn(100, device=DEVICE))

    watched.close()

    watched.expect(graphs=1, measured=0, spooled=1)
    assert watched.reasons() == {ReasonCode.TOO_FEW_CALLS.text: 1}


@pytest.mark.parametrize("deployment", [Deployment.KERNELS, Deployment.GRAPH])
def test_misaligned_inputs_are_copied_as_inductor_does(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, deployment: Deployment
) -> None:
    """Kernels are compiled for aligned inputs; a view that begins in between must not reach them."""
    force(monkeypatch, deployment)
    compiled = torch.compile(lambda x: (x * 2 + 1).relu(), mode="reduce-overhead")
    with torch.no_grad():
        compiled(torch.randn(1024, device=DEVICE))
        for step in range(2 * ENOUGH):
            base = torch.randn(1030, device=DEVICE)
            x = base[step % 4 : 1024 + step % 4]
            assert torch.equal(compiled(x), (x * 2 + 1).relu())

    watched.expect(measured=1)


class DetourByTheCpu(torch.autograd.Function):  # type: ignore[misc]
    """A backward of which nothing can be captured."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.cpu() * 2).to(DEVICE)


@pytest.mark.parametrize("forward", [Deployment.KERNELS, Deployment.GRAPH])
def test_a_backward_that_cannot_be_captured_after_a_forward_that_is_not(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, forward: Deployment
) -> None:
    """Inductor asserts that a captured forward has made a manager of trees; of ours, none has."""
    force(monkeypatch, forward, Deployment.KERNELS, Deployment.KERNELS)
    compiled = torch.compile(lambda x: DetourByTheCpu.apply(x).sin(), mode="reduce-overhead")
    for _ in range(2 * ENOUGH):
        x = torch.randn(50, device=DEVICE, requires_grad=True)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * torch.cos(2 * x))


def test_a_capture_of_the_users_is_stepped_aside_for(watched: Watched) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, mode="reduce-overhead")
    x = torch.randn(100, device=DEVICE)
    with torch.no_grad():
        for _ in range(8):
            compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        x.fill_(2.0)
        graph.replay()

        torch.testing.assert_close(y, torch.full_like(y, 2.0).sin() + 1)
        for _ in range(ENOUGH):
            compiled(x)

    watched.expect(measured=1)
    assert watched.report.fallbacks[IN_A_CAPTURE] == 1
    assert set(watched.report.fallbacks) == {IN_A_CAPTURE, recordings.NOT_YET}


def test_calls_of_another_thread_are_measured_like_any(watched: Watched) -> None:
    """Only those that overlap run as KERNELS."""
    compiled = torch.compile(lambda x: x.sin() + 1, mode="reduce-overhead")
    x = torch.randn(100, device=DEVICE)
    with torch.no_grad():
        for _ in range(8):
            compiled(x)

    results: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.extend(compiled(x) for _ in range(ENOUGH))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

    for each in results:
        assert torch.equal(each, x.sin() + 1)
    watched.expect(graphs=1, measured=1)


def test_each_dynamic_size_that_comes_back_is_measured_and_all_are_right(watched: Watched) -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(-1), mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        for step in range(3 * ENOUGH):
            for columns in (8, 24, 100 + step):
                x = torch.randn(16, columns, device=DEVICE)
                torch.testing.assert_close(compiled(x), (x.sin() + 1).sum(-1))

    watched.expect(graphs=1, sizes=2, measured=2)
    assert set(watched.report.fallbacks) == {shapes.NOT_OFTEN_ENOUGH, recordings.NOT_YET}
    decided = [each["sizes"] for each in watched.report.summary()["decisions"]]
    assert [len(sizes) > 0 for sizes in decided] == [False, True, True]


def test_more_dynamic_sizes_than_are_decided_apart_run_as_kernels(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 8
    monkeypatch.setattr(watched.session, "options", settings.read({settings.SIZES: str(bound)}))
    monkeypatch.setattr(shapes, "FREE_SIZES", bound)  # a recording takes long on a busy host
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(-1), mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            for columns in range(20, 32):
                x = torch.randn(16, columns, device=DEVICE)
                torch.testing.assert_close(compiled(x), (x.sin() + 1).sum(-1))

    watched.expect(graphs=1, sizes=bound)
    assert watched.report.fallbacks[shapes.TOO_MANY_TO_DECIDE] == 2 * (12 - bound)


def test_dropout_is_random_and_reproducible(watched: Watched) -> None:
    module = model(dropout=0.5)
    compiled = torch.compile(module, mode="reduce-overhead")
    x = torch.randn(32, 64, device=DEVICE)
    for _ in range(ENOUGH):
        compiled(x).sum().backward()
        module.zero_grad(set_to_none=True)
    watched.expect(measured=2)

    torch.manual_seed(3)
    first, second = compiled(x).detach().clone(), compiled(x).detach().clone()
    torch.manual_seed(3)
    again = compiled(x).detach().clone()

    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_decided_region_is_out_of_the_way(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraphd.client.autotune import partition_trial

    compiled = torch.compile(lambda x: x.sin() + 1, mode="reduce-overhead")
    x = torch.randn(100, device=DEVICE)
    with torch.no_grad():
        for _ in range(ENOUGH):
            compiled(x)
        watched.expect(measured=1)
        monkeypatch.setattr(partition_trial.PartitionTrial, "__call__", None)
        assert torch.equal(compiled(x), x.sin() + 1)
