"""Operators that know more than their arguments: each call runs them, once, in every mode, and what is around them is recorded."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.frontend import settings
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.relocated import Relocated
    from tests.support.watched import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 96
"""More than it takes to record, measure and decide."""


class State:
    """What operators keep on the host; made anew for each test."""

    factor = 1.0
    calls = 0
    table: torch.Tensor
    workspace: torch.Tensor
    generator: torch.Generator


@torch.library.custom_op("host_tests::scaled", mutates_args=())  # type: ignore[untyped-decorator]
def scaled(x: torch.Tensor) -> torch.Tensor:
    State.calls += 1
    return x * State.factor


@torch.library.custom_op("host_tests::scaled_backward", mutates_args=())  # type: ignore[untyped-decorator]
def scaled_backward(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * State.factor


@torch.library.custom_op("host_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[untyped-decorator]
def unsafe(x: torch.Tensor) -> torch.Tensor:
    State.calls += 1
    return x * State.factor


@torch.library.custom_op("host_tests::masked", mutates_args=())  # type: ignore[untyped-decorator]
def masked(x: torch.Tensor) -> torch.Tensor:
    return x * State.table.to(torch.int32)


@torch.library.custom_op("host_tests::in_workspace", mutates_args=())  # type: ignore[untyped-decorator]
def in_workspace(x: torch.Tensor) -> torch.Tensor:
    if State.workspace.numel() < x.numel():
        State.workspace = torch.zeros(2 * x.numel(), device=x.device)
    space = State.workspace[: x.numel()].view_as(x)
    space.copy_(x).mul_(2)
    return space.cumsum(0)


@torch.library.custom_op("host_tests::noisy", mutates_args=())  # type: ignore[untyped-decorator]
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, device=x.device, generator=State.generator)


@torch.library.custom_op("host_tests::add_to", mutates_args=("x",))  # type: ignore[untyped-decorator]
def add_to(x: torch.Tensor) -> None:
    State.calls += 1
    x.add_(State.factor)


for operator in (scaled, scaled_backward, unsafe, masked, in_workspace, noisy):
    operator.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: torch.ops.host_tests.scaled_backward(gradient))


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    State.factor, State.calls = 1.0, 0
    State.table = torch.ones(8, device="cuda", dtype=torch.bool)
    State.workspace = torch.zeros(64, device="cuda")
    State.generator = torch.Generator(device="cuda").manual_seed(11)
    yield
    del State.table, State.workspace, State.generator


def x(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (40,)), device="cuda")


def expect_graphs(watched: Watched, *, captured: int) -> None:
    """Assert that what is around the operators was recorded, and that nothing of ours has failed."""
    watched.expect()
    assert watched.report.counts["captured"] >= captured, watched.reasons()


@pytest.fixture(params=[None, "reduce-overhead"], ids=["default", "reduce-overhead"])
def mode(request: pytest.FixtureRequest) -> str | None:
    """Return one of the modes of `torch.compile`."""
    chosen: str | None = request.param
    return chosen


def test_a_number_that_python_has_set_is_read_at_every_call(watched: Watched, mode: str | None) -> None:
    run = torch.compile(lambda x: scaled(x.sin()).cos() + x, mode=mode)
    for step in range(2 * STEPS):
        State.factor = 1.0 if step < STEPS else 1.0 + step % 10
        a = x()
        torch.testing.assert_close(run(a), (a.sin() * State.factor).cos() + a)
    expect_graphs(watched, captured=2)


def test_each_call_runs_it_once_while_its_graph_is_recorded_too(watched: Watched, mode: str | None) -> None:
    run = torch.compile(lambda x: scaled(x.sin()) * 2, mode=mode)
    for step in range(STEPS):
        a = x()
        torch.testing.assert_close(run(a), a.sin() * 2)
        assert State.calls == step + 1
    expect_graphs(watched, captured=2)


def test_in_training_both_halves_are_split(watched: Watched, mode: str | None) -> None:
    run = torch.compile(lambda x: (scaled(x.sin()) * 2).exp(), mode=mode)
    for step in range(STEPS):
        State.factor = 1.0 + step % 3 / 8
        a, b = x().requires_grad_(), None
        run(a).sum().backward()
        b = a.detach().clone().requires_grad_()
        (b.sin() * State.factor * 2).exp().sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
        assert State.calls == step + 1
    expect_graphs(watched, captured=4)


def test_a_table_may_change_in_place_and_be_replaced(watched: Watched, mode: str | None) -> None:
    run = torch.compile(lambda x: masked(x.exp()) - 1, mode=mode)
    for step in range(2 * STEPS):
        if step == STEPS:
            State.table = torch.zeros(8, device="cuda", dtype=torch.bool)
        if step % 9 == 8:
            State.table[step % 8] ^= True
        a = x(3, 8)
        torch.testing.assert_close(run(a), a.exp() * State.table.int() - 1)
    expect_graphs(watched, captured=2)


def test_a_workspace_that_is_replaced_is_written_to_no_more(watched: Watched) -> None:
    run = torch.compile(lambda x: in_workspace(x * 3) + x, dynamic=False)
    larger = torch.compile(lambda x: in_workspace(x - 1) * x, dynamic=False)
    for step in range(2 * STEPS):
        kept = [torch.full((64,), float(step), device="cuda") for _ in range(8 * (step > STEPS))]
        a = x(48)
        torch.testing.assert_close(run(a), (a * 6).cumsum(0) + a)
        assert all((each == step).all() for each in kept)
        if step in (STEPS, STEPS + 20):
            b = x(100 * (step - STEPS + 1))
            torch.testing.assert_close(larger(b), ((b - 1) * 2).cumsum(0) * b, rtol=1e-4, atol=1e-3)
    expect_graphs(watched, captured=2)


def test_a_generator_of_its_own_goes_on_by_one_call_each(watched: Watched) -> None:
    run = torch.compile(lambda x: noisy(x * 2) * 0.5)
    other = torch.Generator(device="cuda").manual_seed(11)
    for _ in range(STEPS):
        a = x()
        expected = (a * 2 + torch.rand(40, device="cuda", generator=other)) * 0.5
        torch.testing.assert_close(run(a), expected)
    expect_graphs(watched, captured=2)


def test_what_an_operator_writes_to_is_what_the_next_part_reads(watched: Watched) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        add_to(y)
        return y.cos()

    run = torch.compile(function)
    for step in range(STEPS):
        State.factor = float(step % 4)
        a = x()
        torch.testing.assert_close(run(a), (a.sin() + State.factor).cos())
        assert State.calls == step + 1
    expect_graphs(watched, captured=2)


def test_one_that_is_tagged_runs_at_every_call_in_every_mode(watched: Watched, mode: str | None) -> None:
    run = torch.compile(lambda x: unsafe(x.sin()).cos() + x, mode=mode)
    for step in range(2 * STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        State.factor = 1.0 if step < STEPS else 1.0 + step % 10
        a = x()
        torch.testing.assert_close(run(a), (a.sin() * State.factor).cos() + a)
        assert State.calls == step + 1
    expect_graphs(watched, captured=2)


def test_one_in_a_branch_runs_as_kernels_with_its_graph(watched: Watched) -> None:
    """Inductor splits nothing within a branch."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > -1e9, lambda x: scaled(x) + 1, lambda x: x - 1, (x.sin(),))

    run = torch.compile(function)
    for step in range(STEPS):
        State.factor = 1.0 + step % 5
        a = x()
        torch.testing.assert_close(run(a), a.sin() * State.factor + 1)
    watched.expect(captured=0)
    assert [each.startswith("has custom operators") for each in watched.reasons()] == [True]


@pytest.fixture
def vouching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.GRAPH_OPS, "host_tests")


def test_one_that_the_user_vouches_for_is_recorded_with_the_rest(vouching: None, watched: Watched) -> None:
    run = torch.compile(lambda x: scaled(x.sin()).cos())
    for _ in range(STEPS):
        a = x()
        torch.testing.assert_close(run(a), a.sin().cos())
    watched.expect()
    assert watched.report.counts["captured"] == 1
    assert State.calls < STEPS


# --- generators that a graph is given ---------------------------------------------------------------------------------


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x.sin() + 2, 0.5)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    for _ in range(2):
        x = checkpoint(dropped, x, use_reentrant=False)
    return x


def kept(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Assert that the backward has drawn what the forward had: a gradient is zero exactly where the output is."""
    assert gradient is not None
    assert torch.equal(output != 0, gradient != 0)
    assert 0.3 < float((output != 0).float().mean()) < 0.7


def kept_in_both(x: torch.Tensor, output: torch.Tensor) -> None:
    """Assert the same of `checkpointed`: which of its two masks kept an element follows from the output, and the gradient from both."""
    assert x.grad is not None
    x, gradient, output = x.detach(), x.grad, output.detach()
    between = 2 * (x.sin() + 2)
    if_kept, if_dropped = 2 * (between.sin() + 2), torch.full_like(x, 4.0)
    first = (output - if_kept).abs() < (output - if_dropped).abs()
    second = output != 0
    torch.testing.assert_close(output, torch.where(first, if_kept, if_dropped) * second, rtol=1e-3, atol=1e-3)
    is_clear = (if_kept - if_dropped).abs() > 1e-2
    right = torch.where(first & second, 4 * x.cos() * between.cos(), 0.0)
    torch.testing.assert_close(gradient[is_clear], right[is_clear], rtol=1e-3, atol=1e-3)
    assert 0.15 < float((gradient != 0).float().mean()) < 0.35


def test_a_checkpoint_draws_in_its_backward_what_its_forward_drew(watched: Watched, mode: str | None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        result: torch.Tensor = checkpoint(dropped, x, use_reentrant=False)
        return result

    run = torch.compile(function, mode=mode)
    seen = []
    for _ in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        a = x(4096).requires_grad_()
        output = run(a)
        output.sum().backward()
        kept(output, a.grad)
        seen.append((output != 0).clone())
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(seen))
    assert not [each for each in watched.report.fallbacks if "Generator" in each], watched.report.fallbacks


def test_several_forwards_may_be_in_flight(relocated: Relocated) -> None:
    """PyTorch sets the backward's generators to where each forward began."""
    run = torch.compile(checkpointed, mode="reduce-overhead", dynamic=False)
    for _ in range(6):
        inputs = [x(4096).requires_grad_() for _ in range(3)]
        outputs = [run(each) for each in inputs]
        for each, output in reversed([*zip(inputs, outputs, strict=True)]):
            output.sum().backward()
            kept_in_both(each, output)
    assert [refusal_of(each) for each in relocated.made if refusal_of(each)] == []
    assert relocated.made


def test_checkpoints_draw_what_they_draw_without_graphs(relocated: Relocated) -> None:
    """From the same seed, call by call: each launch is given what the generators have come to, and they go on as far."""
    run = torch.compile(checkpointed, mode="reduce-overhead", dynamic=False)

    def masks() -> list[torch.Tensor]:
        torch.manual_seed(5)
        found = []
        for _ in range(8):
            a = torch.ones(4096, device="cuda", requires_grad=True)
            output = run(a)
            output.sum().backward()
            assert a.grad is not None
            found += [output.detach().clone(), a.grad.clone()]
        return found

    captured = masks()
    relocated.expect_all_captured()
    with relocated.as_kernels():
        of_kernels = masks()
    assert all(map(torch.equal, captured, of_kernels))


def test_checkpoints_beside_a_custom_operator_draw_what_they_should(vouching: None, watched: Watched) -> None:
    """Up to torch 2.12 a capture that fails leaves the generators as if they still were captured; `test_generators.py` has the refusal."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = checkpointed(x)
        return y + (scaled(y.detach()) - y.detach())  # exactly 0

    run = torch.compile(function, mode="reduce-overhead", dynamic=False)
    for _ in range(STEPS):
        a = x(4096).requires_grad_()
        output = run(a)
        output.sum().backward()
        kept_in_both(a, output)
    watched.expect()
