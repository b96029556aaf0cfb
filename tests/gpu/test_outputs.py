"""Outputs and gradients of relocatable graphs are tensors like any others: whatever is done to one concerns no other."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CALLS = 8


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 56), torch.nn.GELU(), torch.nn.LayerNorm(56), torch.nn.Linear(56, 24)
    ).cuda()


def mixed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs of several sizes and types, some where temporaries were, one that is a part of another and one of the input."""
    wide = torch.cat([x, x.sin()], 1)
    narrow = (wide @ wide.t()).relu()
    return (
        narrow.sum(0),
        wide[:, :3] * 2,
        narrow,
        narrow[1:, :2],
        wide.argmax(1),
        narrow > 1,
        x[1:],
        x.exp().half(),
    )


def told(outputs: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return all that can be seen of outputs beside their values."""
    numbers: dict[int, int] = {}
    return [
        (
            numbers.setdefault(each.untyped_storage().data_ptr(), len(numbers)),
            each.untyped_storage().nbytes(),
            each.storage_offset(),
            tuple(each.size()),
            each.stride(),
            each.dtype,
            each.is_contiguous(),
            each.requires_grad,
            each.is_leaf,
            each._base is None,
            type(each),
        )
        for each in outputs
    ]


def changed(outputs: Sequence[torch.Tensor]) -> list[int]:
    """Change all in place, and return by how much the version of each has gone up: further for those that share a storage.

    Where it begins is no matter: a library that was told where to write has counted that, too.
    """
    before = [each._version for each in outputs]
    for each in outputs:
        each.copy_(each.clone())
    return [each._version - version for each, version in zip(outputs, before, strict=True)]


def gradients(module: torch.nn.Module, run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad(set_to_none=True)
    run(x).square().sum().backward()
    return [each.grad for each in module.parameters() if each.grad is not None]


def test_outputs_look_as_those_of_the_same_code_as_kernels(relocated: Relocated) -> None:
    x = torch.randn(8, 40, device="cuda")
    with relocated.as_kernels():
        outputs = torch.compile(mixed, mode="reduce-overhead")(x)
        of_kernels, by = told(outputs), changed(outputs)
    run = torch.compile(mixed, mode="reduce-overhead")

    kept = [run(x) for _ in range(CALLS)]

    for outputs in kept:
        assert (told(outputs), changed(outputs)) == (of_kernels, by)
        for mine, right in zip(outputs, mixed(x), strict=True):
            torch.testing.assert_close(mine, right)
    fresh = [each.untyped_storage() for outputs in kept for each in outputs[:3]]
    assert len({each.data_ptr() for each in fresh}) == len(fresh)
    assert all(each.data_ptr() % 512 == 0 and each.resizable() for each in fresh)
    relocated.expect_all_captured()


def test_gradients_look_as_those_of_the_same_code_as_kernels(relocated: Relocated) -> None:
    module, x = layers(), torch.randn(8, 40, device="cuda")
    with relocated.as_kernels():
        found = gradients(module, torch.compile(module, mode="reduce-overhead"), x)
        of_kernels, by = told(found), changed(found)
    run = torch.compile(module, mode="reduce-overhead")

    for _ in range(CALLS):
        found = gradients(module, run, x)
        assert (told(found), changed(found)) == (of_kernels, by)

    assert len({number for number, *_ in of_kernels}) == len(of_kernels)
    relocated.expect_all_captured()


def test_saving_one_saves_no_other(relocated: Relocated) -> None:
    module, x = layers(), torch.randn(8, 40, device="cuda")
    run = torch.compile(module, mode="reduce-overhead")
    for _ in range(CALLS):
        found = [*gradients(module, run, x), run(x).detach()]

    for each in found:
        file, plain = io.BytesIO(), io.BytesIO()
        torch.save(each, file)
        torch.save(torch.empty_like(each).copy_(each), plain)
        assert len(file.getbuffer()) == len(plain.getbuffer())
    relocated.expect_all_captured()


def test_a_storage_that_is_given_back_takes_nothing_with_it(relocated: Relocated) -> None:
    module, x = layers(), torch.randn(8, 40, device="cuda")
    run = torch.compile(lambda x: (module(x).sin(), module(x).cos(), x.exp()), mode="reduce-overhead")
    for _ in range(CALLS):
        expected = [each.detach() for each in (module(x).sin(), module(x).cos(), x.exp())]
        right = [each.clone() for each in gradients(module, lambda x: run(x)[0], x)]
        mine = gradients(module, lambda x: run(x)[0], x)
        outputs = [each.detach() for each in run(x)]

        outputs[0].untyped_storage().resize_(0)
        mine[1].untyped_storage().resize_(0)
        assert (outputs[0].untyped_storage().nbytes(), mine[1].untyped_storage().nbytes()) == (0, 0)
        scribble = [torch.full_like(each, -3) for each in (*right, *expected) for _ in range(4)]

        torch.testing.assert_close(outputs[1:], expected[1:])
        for index in (0, 2, 3, 4, 5):
            torch.testing.assert_close(mine[index], right[index])
        del scribble
    relocated.expect_all_captured()


def test_what_is_resized_does_not_come_to_lie_over_its_neighbours(relocated: Relocated) -> None:
    def small(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), x.cos(), x[:3] * 2, x[:5] + 1, x.exp(), x.sum()

    run = torch.compile(small, mode="reduce-overhead")
    for _ in range(CALLS):
        x = torch.randn(40, device="cuda")
        got, expected = run(x), small(x)
        for which, size in ((2, 4096), (0, 64), (3, 300)):
            for outputs in (got, expected):
                outputs[which].resize_(size).fill_(-7)

        torch.testing.assert_close(list(got), list(expected))

        got[1].set_(torch.zeros(2, device="cuda").untyped_storage(), 0, (2,), (1,)).fill_(5)
        torch.testing.assert_close(got[4], expected[4])
    relocated.expect_all_captured()


def test_memory_that_another_stream_still_reads_is_not_given_out(relocated: Relocated) -> None:
    """`record_stream` does nothing, and says nothing, for memory that is not the allocator's own."""
    run = torch.compile(lambda x: (x * 2, x + 1), mode="reduce-overhead")
    x, other = torch.ones(1 << 20, device="cuda"), torch.cuda.Stream()
    for _ in range(CALLS):
        run(x)
    torch.cuda.synchronize()
    for cycles in (50_000_000, 1_000_000_000, 5_000_000_000):  # a busy host may take longer than the first
        doubled, _ = run(x)
        place = doubled.data_ptr()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(cycles)
            seen = doubled.clone()
        doubled.record_stream(other)
        del doubled
        busy = [torch.full_like(x, -1) for _ in range(4)]
        if not other.query():
            break
        torch.cuda.synchronize()
    else:
        pytest.fail("the other stream had read it before the host had allocated")

    assert place not in {each.data_ptr() for each in busy}
    torch.cuda.synchronize()
    assert bool((seen == 2).all())
    relocated.expect_all_captured()


def test_memory_of_one_output_is_free_when_that_is_dropped(relocated: Relocated) -> None:
    run = torch.compile(lambda x: (x.repeat(64) * 2, x + 1), mode="reduce-overhead")
    x = torch.ones(1 << 18, device="cuda")
    for _ in range(CALLS):
        run(x)

    large, small = run(x)
    held = torch.cuda.memory_allocated()
    size = large.nbytes
    del large

    assert held - torch.cuda.memory_allocated() == size
    assert bool((small == 2).all())


def test_what_is_copied_to_its_place_is_what_a_library_returns(relocated: Relocated) -> None:
    """Gradients of a convolution's weights lie where temporaries were, and are cuDNN's."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ReLU()) for _ in range(4)]
    ).cuda()
    run = torch.compile(module, mode="reduce-overhead")
    for _ in range(CALLS):
        x = torch.randn(2, 16, 32, 32, device="cuda")
        right = [each.clone() for each in gradients(module, module, x)]
        mine = gradients(module, run, x)

        torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)
        assert {each.untyped_storage().nbytes() - each.nbytes for each in mine} == {0}
        assert len({each.untyped_storage().data_ptr() for each in mine}) == len(mine)
    relocated.expect_all_captured()


# --- what a forward saves ----------------------------------------------------------------------------------------


@pytest.fixture
def saved_values_stay() -> Iterator[None]:
    """Keep the backward from writing over what was saved, for which PyTorch refuses to keep a graph."""
    from torch._functorch import config

    # Not by monkeypatch: what that undoes is a deletion to the module, which then hides the setting from torch itself.
    with config.patch(donated_buffer=False):
        yield


def summed(
    module: torch.nn.Module, run: Callable[..., Any], batches: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return gradients that are added up over several forwards before the first backward."""
    module.zero_grad(set_to_none=True)
    for result in [run(batch).sin().sum() for batch in batches]:
        result.backward()
    return [each.grad.clone() for each in module.parameters() if each.grad is not None]


@pytest.mark.parametrize("forwards", [2, 7])
def test_forwards_that_wait_for_their_backward_keep_what_they_saved(
    relocated: Relocated, forwards: int
) -> None:
    module = layers()
    run = torch.compile(module, mode="reduce-overhead")
    for _ in range(CALLS):
        batches = [torch.randn(8, 40, device="cuda") for _ in range(forwards)]
        torch.testing.assert_close(
            summed(module, run, batches), summed(module, module, batches), rtol=2e-3, atol=2e-3
        )
    relocated.expect_all_captured()


@pytest.mark.usefixtures("saved_values_stay")
def test_a_graph_that_is_kept_keeps_what_it_saved(relocated: Relocated) -> None:
    module = layers()
    run = torch.compile(module, mode="reduce-overhead")
    first, second = (torch.randn(8, 40, device="cuda") for _ in range(2))
    for _ in range(CALLS):
        gradients(module, run, first)

    kept = run(first).square().sum()
    for _ in range(CALLS):
        gradients(module, run, second)
    module.zero_grad(set_to_none=True)
    kept.backward(retain_graph=True)
    kept.backward()
    mine = [each.grad.clone() for each in module.parameters() if each.grad is not None]

    torch.testing.assert_close(
        mine, [2 * each for each in gradients(module, module, first)], rtol=2e-3, atol=2e-3
    )
    relocated.expect_all_captured()


@pytest.mark.usefixtures("saved_values_stay")
def test_hooks_on_saved_tensors_may_keep_them(relocated: Relocated) -> None:
    module, kept = layers(), list[tuple[torch.Tensor, torch.Tensor]]()
    run = torch.compile(module, mode="reduce-overhead")

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor, tensor.detach().clone()))
        return tensor

    for _ in range(CALLS):
        x = torch.randn(8, 40, device="cuda")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mine = [each.clone() for each in gradients(module, run, x)]
        torch.testing.assert_close(mine, gradients(module, module, x), rtol=2e-3, atol=2e-3)

    own = {each.data_ptr() for each in module.parameters()}
    for tensor, value in kept:
        if tensor.data_ptr() not in own:
            torch.testing.assert_close(tensor.detach(), value)
    relocated.expect_all_captured()


def test_an_output_that_is_saved_too_belongs_to_the_user(relocated: Relocated) -> None:
    """exp saves its own result."""
    run = torch.compile(lambda x: (x * 2).exp(), mode="reduce-overhead")
    x = torch.ones(1000, device="cuda", requires_grad=True)

    kept = []
    for step in range(10):
        result = run(x * (step / 10))
        result.sum().backward()
        kept.append(result.detach())

    assert len({each.data_ptr() for each in kept}) == len(kept)
    for step, each in enumerate(kept):
        torch.testing.assert_close(each, torch.full_like(each, step / 5).exp())


@pytest.mark.parametrize("ballast", [0, 80 << 20])
def test_parameters_that_are_added_accumulate_a_gradient_each(relocated: Relocated, ballast: int) -> None:
    """Their gradient is one tensor in compiled code. With 64 MiB of tensors, captures get addresses without memory."""
    kept = torch.empty(ballast, dtype=torch.uint8, device="cuda")

    def accumulated(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        base, delta = (torch.randn(64, 64, device="cuda", requires_grad=True) for _ in "ab")
        seen = []
        for step in range(CALLS):
            x = torch.randn(32, 64, device="cuda")
            call(base, delta, x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_([base, delta], 0.01)
            assert base.grad is not None
            assert delta.grad is not None
            seen += [base.grad.clone(), delta.grad.clone()]
            if step % 3 == 2:
                base.grad = delta.grad = None
        return seen

    def function(base: torch.Tensor, delta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, base + delta).tanh()

    found = accumulated(torch.compile(function, mode="reduce-overhead", dynamic=False))
    torch.testing.assert_close(found, accumulated(function), rtol=1e-3, atol=1e-5)
    relocated.expect_all_captured()
    assert kept.numel() == ballast
