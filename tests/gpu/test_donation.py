"""Activations that a recorded backward lays other memory over, in real training on a GPU."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import _torch, donation
from pygraphd.client.relocatable import LOOKS
from tests.gpu.guards import Guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.replay import Replay
    from tests.gpu.conftest import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 8


def model() -> torch.nn.Module:
    """Return convolutions of which the first ones, whose backward comes last, have most to do: activations of 32 MiB to 4."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 32, 3, padding=1)]
    for width in (32, 64, 128, 256):
        layers += _block(width, width) + _block(width, width)
        layers += [torch.nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)]
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 8)]
    return torch.nn.Sequential(*layers).cuda()


def _block(inputs: int, outputs: int) -> list[torch.nn.Module]:
    return [torch.nn.Conv2d(inputs, outputs, 3, padding=1), torch.nn.BatchNorm2d(outputs), torch.nn.GELU()]


def batches(steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(64, 3, 64, 64, device="cuda", generator=generator) for _ in range(steps)]


def train(module: torch.nn.Module, run: Callable[..., Any], in_flight: int = 1) -> list[float]:
    """Return the losses of some steps, each with so many forwards before their backwards."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for batch in batches():
        parts = [run(batch + number).square().mean() for number in range(in_flight)]
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(sum(part.item() for part in parts))
    return losses


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "WORTH_BYTES", 32 << 20)
    monkeypatch.setattr(donation, "STRETCH_BYTES", 4 << 20)


def backward_of(relocated: Relocated) -> Replay:
    """Return the recording of the only backward."""
    (backward,) = (each for each in relocated.made if each.facts.is_backward)
    (replay,) = backward.replays
    return replay


def scratch_bytes(replay: Replay) -> int:
    """Return how much memory a call needs in which no output lies."""
    seen = {replay._layout.outputs.memory_of(index) for index in range(len(replay._layout.outputs.all))}
    return sum(each.bytes for slot, each in enumerate(replay.memories) if slot not in seen)


def test_training_needs_less_memory_and_is_right(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model()
    losses = train(module, torch.compile(module, mode="reduce-overhead"))
    replay = backward_of(relocated)
    overwritten, scratch = len(replay._layout.overwritten), scratch_bytes(replay)

    relocated.expect(captured=len(relocated.made) + 1, donated=overwritten)
    assert overwritten >= 6
    assert replay.counts.replays > 1
    monkeypatch.setattr(donation, "WORTH_BYTES", 1 << 60)
    torch.compiler.reset()
    relocated.made.clear()
    same = model()
    without = train(same, torch.compile(same, mode="reduce-overhead"))
    assert scratch <= scratch_bytes(backward_of(relocated)) - (32 << 20)
    torch.testing.assert_close(losses, without, rtol=2e-3, atol=1e-5)
    eager = model()
    torch.testing.assert_close(losses, train(eager, eager), rtol=2e-3, atol=1e-4)


def test_nothing_is_written_beside_what_is_overwritten(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded("cuda")
    monkeypatch.setattr(_torch, "allocator", lambda _device: guarded)
    module = model()

    losses = train(module, torch.compile(module, mode="reduce-overhead"))

    assert backward_of(relocated).overwritten
    assert len(guarded._given) > STEPS
    for block in guarded._given:
        block.expect_guards()
    eager = model()
    torch.testing.assert_close(losses, train(eager, eager), rtol=2e-3, atol=1e-4)


def test_forwards_in_flight_keep_what_they_saved(relocated: Relocated) -> None:
    """Four have memory side by side; of a fifth it comes from the allocator, and so the backward is recorded as it was before."""
    module, eager = model(), model()
    compiled = torch.compile(module, mode="reduce-overhead")

    for in_flight, overwrites in ((1, True), (4, True), (5, False), (2, False)):
        eager.load_state_dict(module.state_dict())
        losses = train(module, compiled, in_flight)
        torch.testing.assert_close(losses, train(eager, eager, in_flight), rtol=2e-2, atol=1e-4)
        assert bool(backward_of(relocated).overwritten) == overwrites
        assert backward_of(relocated).counts.replays > 2


def changed_by_a_backward(run: Callable[..., Any]) -> set[int]:
    """Return which of the tensors that a user's hooks have seen are something else when backward has run, by their order."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        seen.append((saved.detach(), saved.detach().clone()))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = run(batches(1)[0]).square().mean()
    loss.backward()
    assert seen
    return {index for index, (now, before) in enumerate(seen) if not torch.equal(now, before)}


def test_what_a_user_s_hooks_have_seen_is_left_as_it_is(relocated: Relocated) -> None:
    """But for what PyTorch overwrites without us."""
    module = model()
    compiled = torch.compile(module, mode="reduce-overhead")
    train(module, compiled)
    assert backward_of(relocated).overwritten

    ours = changed_by_a_backward(compiled)

    with relocated.launched():
        same = torch.compile(module, mode="reduce-overhead")
        changed_by_a_backward(same)
        assert ours <= changed_by_a_backward(same)
    assert relocated.report.counts["donated"] > 0


def test_a_backward_that_is_looked_at_in_vain_keeps_nothing(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at what calls it must not keep its gradients, not even until Python collects garbage."""
    monkeypatch.setattr(donation, "WORTH_BYTES", 1 << 60)
    module = model()
    compiled = torch.compile(module, mode="reduce-overhead")
    given = batches(LOOKS + 8)
    allocated = []
    gc.disable()
    try:
        for batch in given:
            compiled(batch).square().mean().backward()
            module.zero_grad(set_to_none=True)
            allocated.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()

    assert not backward_of(relocated).overwritten
    settled = 5
    assert len(set(allocated[settled:])) == 1, allocated


def test_a_backward_that_is_to_run_again_overwrites_nothing(relocated: Relocated) -> None:
    """Who wants that has to tell PyTorch not to overwrite anything; here it is told when that has been recorded."""
    from torch._functorch import config

    module, eager = model(), model()
    compiled = torch.compile(module, mode="reduce-overhead")
    train(module, compiled)
    assert backward_of(relocated).overwritten
    eager.load_state_dict(module.state_dict())

    with config.patch(donated_buffer=False):
        compiled(batches(1)[0]).square().mean().backward(retain_graph=True)

    eager(batches(1)[0]).square().mean().backward()
    mine, right = ([each.grad for each in one.parameters()] for one in (module, eager))
    torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-4)
    assert not backward_of(relocated).overwritten
