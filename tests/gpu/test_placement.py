"""CPU values that are known when a graph is compiled, and small inputs: on the GPU, with the same results, in one part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend.errors import IN_A_CAPTURE
from pygraphd.client.frontend import settings
from pygraphd.client.placement import inputs
from tests.support.placement.habits import Learned, compare

if TYPE_CHECKING:
    from pygraphd.client.common.report import Report
    from tests.support.relocated import Relocated
    from tests.support.watched import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
ENOUGH = 120


@pytest.fixture(autouse=True)
def with_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.PLACEMENT, "1")
    monkeypatch.setattr(inputs, "FEW_SCALARS", 0)


def interact(x: torch.Tensor) -> torch.Tensor:
    """Multiply features with each other, and pick each pair once, as a DLRM does."""
    products = x @ x.transpose(1, 2)
    rows = torch.tensor([i for i in range(x.shape[1]) for _ in range(i)])
    columns = torch.tensor([j for i in range(x.shape[1]) for j in range(i)])
    return products[:, rows, columns]


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Scale by a table that is made anew on the CPU at every call."""
    table = torch.exp(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]) * -0.1)
    return x * table.to(x.device)


def constant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a constant beside a result."""
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]).to(x.device)
    return weights, x + weights


@pytest.mark.parametrize("mode", ["reduce-overhead", None])
@pytest.mark.parametrize("function", [interact, scaled])
def test_results_are_the_same_and_the_graph_is_in_one_part(
    watched: Watched, function: object, mode: str | None
) -> None:
    assert callable(function)
    compiled = torch.compile(function, mode=mode, dynamic=False)
    with torch.no_grad():
        for _ in range(ENOUGH):
            x = torch.randn(8, 9, 9, device=DEVICE)
            torch.testing.assert_close(compiled(x), function(x))

    watched.expect(graphs=1, measured=1)
    assert watched.report.counts["placed"] > 0
    assert watched.report.summary()["left_on_cpu"] == {}


@pytest.mark.parametrize("function", [interact, scaled])
def test_gradients_are_the_same(watched: Watched, function: object) -> None:
    assert callable(function)
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
    for _ in range(ENOUGH):
        x = torch.randn(8, 9, 9, device=DEVICE, requires_grad=True)
        (expected,) = torch.autograd.grad(function(x).square().sum(), x)
        (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
        torch.testing.assert_close(found, expected)

    watched.expect(graphs=2)
    assert watched.report.summary()["left_on_cpu"] == {}


def test_what_is_returned_is_the_users_to_change(watched: Watched) -> None:
    compiled = torch.compile(constant, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for _ in range(ENOUGH):
            x = torch.randn(9, device=DEVICE)
            for result, expected in zip(compiled(x), constant(x), strict=True):
                assert torch.equal(result, expected)
                result.zero_()

    assert watched.report.counts["placed"] == 1


def test_what_inductor_has_cached_is_right_in_the_next_compilation(watched: Watched) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(interact, mode="reduce-overhead", dynamic=False)
        with torch.no_grad():
            for _ in range(5):
                x = torch.randn(8, 9, 9, device=DEVICE)
                torch.testing.assert_close(compiled(x), interact(x))

    assert watched.report.counts["placed"] == 4  # two indices, told again of the graph from Inductor's cache
    watched.expect()


def soften(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x @ x / by).sigmoid() @ x


def sampled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x @ x / by).softmax(-1) @ x


def copied(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x @ x + by.to(x.device).flip(0) * x


def picked(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x @ x)[by] @ x


def returned(x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return by.to(x.device), x * by.to(x.device)


def scaled_by_number(x: torch.Tensor, by: float) -> torch.Tensor:
    return (x @ x) * by


def padded(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    before = torch.arange(9) < lengths[:, None]
    later = torch.ones(9, 9, dtype=torch.bool).tril() & before
    return torch.where(before.to(x.device), x, 0.5) @ x * later.to(x.device, x.dtype)


def rolled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    places = torch.arange(9) + by
    return (x @ x)[torch.where(places < 9, places, places - 9)] @ x


def biased(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros(9).masked_fill(torch.arange(9) >= lengths[:, None], float("-inf"))
    return (x @ x + bias.to(x.device)).softmax(-1)


INPUTS: list[tuple[Any, Any]] = [
    (soften, lambda step: torch.tensor(1.0 + step)),
    (copied, lambda step: torch.arange(9.0) * step),
    (picked, lambda step: (torch.arange(9) + step) % 9),
    (returned, lambda step: torch.arange(9.0) - step),
]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected)
    for each in found if isinstance(found, tuple) else [found]:
        each.zero_()  # what is returned is the user's to change


@pytest.mark.parametrize(("function", "value"), INPUTS)
def test_an_input_that_changes_is_seen_by_the_next_call(watched: Watched, function: Any, value: Any) -> None:
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
    by = value(0)
    with torch.no_grad():
        for step in range(ENOUGH):
            x = torch.randn(9, 9, device=DEVICE)
            by.numpy()[...] = value(step // 2).numpy()  # which no version tells of
            assert_same(compiled(x, by), function(x, by))

    watched.expect(graphs=1)
    assert watched.report.summary()["left_on_cpu"] == {}
    assert watched.report.counts["placed_inputs"] >= 1
    assert ENOUGH // 2 <= watched.report.counts["sent"] < ENOUGH


def shaped(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x @ x * torch.exp(by * -0.1 * torch.arange(9)).to(x.device) / by


def shifted(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x @ x)[(by + 1) % 9] @ x


COMPUTED: list[tuple[Any, Any]] = [
    (sampled, lambda step: torch.tensor(1.0 + step)),
    (shaped, lambda step: torch.tensor(1.0 + step)),
    (shifted, lambda step: (torch.arange(9) + step) % 9),
    (padded, lambda step: (torch.arange(9) + step) % 10),
    (rolled, lambda step: torch.tensor([step % 9])),
    (biased, lambda step: (torch.arange(9) + step) % 9 + 1),
]
"""Functions for which the CPU computes with an input."""


@pytest.mark.parametrize(("function", "value"), COMPUTED)
def test_what_the_cpu_computes_is_sent_before_what_is_captured(
    watched: Watched, function: Any, value: Any
) -> None:
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
    by = value(0)
    with torch.no_grad():
        for step in range(ENOUGH):
            x = torch.randn(9, 9, device=DEVICE)
            by.numpy()[...] = value(step // 2).numpy()
            assert_same(compiled(x, by), function(x, by))

    watched.expect(graphs=1)
    assert watched.report.summary()["left_on_cpu"] == {}
    assert watched.report.counts["placed_inputs"] >= 1
    # Values that come back may still be there: indices of nine do.
    different = len({value(step // 2).numpy().tobytes() for step in range(ENOUGH)})
    assert different <= watched.report.counts["sent"] <= ENOUGH + 2  # of two values at most


def stepped(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    step += 1
    return ((x @ x) / (1 - 0.9**step)) @ x * (1 - 0.99**step).sqrt()


def test_counters_count_on_the_cpu(watched: Watched) -> None:
    compiled = torch.compile(stepped, mode="reduce-overhead", dynamic=False)
    step, expected = torch.tensor(0.0), torch.tensor(0.0)
    with torch.no_grad():
        for turn in range(ENOUGH):
            if turn == ENOUGH // 2:
                step.fill_(100.0)
                expected.fill_(100.0)
            x = torch.randn(9, 9, device=DEVICE)
            assert_same(compiled(x, step), stepped(x, expected))
            assert step == expected

    watched.expect(graphs=1)
    assert watched.report.summary()["left_on_cpu"] == {}
    assert (watched.report.counts["placed_inputs"], watched.report.counts["sent"]) == (2, ENOUGH)


def test_a_counter_is_not_copied_back(rules: Report) -> None:
    """PyTorch computes it on the GPU, and has the host wait for a copy of each."""
    compiled = torch.compile(stepped, mode="reduce-overhead", dynamic=False)
    x, step = torch.randn(9, 9, device=DEVICE), torch.tensor(0.0)
    with torch.no_grad():
        for _ in range(5):
            compiled(x, step)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                compiled(x, step)
            torch.cuda.synchronize()

    copies = {event.key: event.count for event in profile.key_averages() if "Memcpy" in event.key}
    assert not any("DtoH" in key for key in copies), copies
    assert sum(count for key, count in copies.items() if "HtoD" in key) == 10
    assert (step.item(), rules.counts["sent"], rules.failures) == (15.0, 15, {})


def test_a_python_number_that_changes_is_seen_by_the_next_call(watched: Watched) -> None:
    compiled = torch.compile(scaled_by_number, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(ENOUGH):
            x, by = torch.randn(9, 9, device=DEVICE), 0.1 * (step // 2)
            assert_same(compiled(x, by), scaled_by_number(x, by))

    watched.expect()
    assert watched.report.counts["placed_inputs"] >= 1
    assert watched.report.counts["sent"] < ENOUGH


@pytest.mark.parametrize(("function", "value"), [*INPUTS, *COMPUTED])
def test_pytorchs_own_graphs_see_what_has_changed(rules: Report, function: Any, value: Any) -> None:
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
    by = value(0)
    with torch.no_grad():
        for step in range(12):
            x = torch.randn(9, 9, device=DEVICE)
            by.copy_(value(step // 2))
            torch.compiler.cudagraph_mark_step_begin()
            assert_same(compiled(x, by), function(x, by))

    assert (rules.failures, rules.counts["placed_inputs"] > 0) == ({}, True)


@pytest.mark.parametrize(("function", "value"), [*INPUTS, *COMPUTED])
def test_relocated_graphs_see_what_has_changed(
    relocated: Relocated, rules: Report, function: Any, value: Any
) -> None:
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
    by = value(0)
    with torch.no_grad():
        for step in range(20):
            x = torch.randn(9, 9, device=DEVICE)
            by.copy_(value(step // 2))
            assert_same(compiled(x, by), function(x, by))

    relocated.expect_all_captured()
    assert (rules.failures, rules.counts["placed_inputs"] > 0) == ({}, True)


def test_gradients_are_those_of_the_value_at_that_call(watched: Watched) -> None:
    compiled = torch.compile(soften, mode="reduce-overhead", dynamic=False)
    by = torch.tensor(1.0)
    for step in range(ENOUGH):
        by.fill_(1.0 + step // 2)
        x = torch.randn(9, 9, device=DEVICE, requires_grad=True)
        (expected,) = torch.autograd.grad(soften(x, by).square().sum(), x)
        (found,) = torch.autograd.grad(compiled(x, by).square().sum(), x)
        # Sums that cancel: in 32 bits they are off by 5e-7 of the largest gradient now and then, and by 6e-4 and more with another call's value.
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))

    watched.expect()
    assert watched.report.counts["placed_inputs"] >= 2


def test_values_that_change_are_sent_to_one_address(rules: Report) -> None:
    from pygraphd.client.placement.upload import SENT, specs_text

    value, index = torch.tensor(0.0), torch.arange(9)
    device, kinds = torch.device(DEVICE, 0), specs_text([value, index])
    places = set()
    for step in range(20):
        value.fill_(step)
        sent = SENT([value, index], device, kinds, "of this test")
        assert (sent[0][0].item(), sent[1][:9].tolist()) == (step, index.tolist())
        places.add(tuple(each.data_ptr() for each in sent))
        del sent  # which would keep its place

    assert (len(places), rules.counts["sent"], rules.failures) == (1, 21, {})


def test_what_has_changed_is_sent_without_waiting_for_the_gpu(rules: Report) -> None:
    from pygraphd.client.placement.upload import SENT, specs_text

    value, device = torch.tensor(0.0), torch.device(DEVICE, 0)
    SENT([value], device, specs_text([value]), "of this test")
    torch.cuda._sleep(1_000_000_000)
    value.fill_(1.0)
    (sent,) = SENT([value], device, specs_text([value]), "of this test")

    assert not torch.cuda.current_stream().query()
    assert sent[0].item() == 1.0
    assert rules.counts["sent"] == 2


def test_values_are_right_while_the_gpu_is_behind(rules: Report) -> None:
    """What was sent, and where it was sent from, must not be written anew while a copy or a kernel is still to come."""
    compiled = torch.compile(soften, dynamic=False, options={"triton.cudagraphs": True})
    x, by = torch.randn(9, 9, device=DEVICE), torch.tensor(1.0)
    with torch.no_grad():
        compiled(x, by)
        torch.cuda._sleep(200_000_000)
        found = []
        for step in range(300):
            by.fill_(1.0 + step)
            found.append(compiled(x, by).clone())
        for step, each in enumerate(found):
            torch.testing.assert_close(each, soften(x, torch.tensor(1.0 + step)))

    assert rules.failures == {}


def test_each_stream_has_values_of_its_own(relocated: Relocated, rules: Report) -> None:
    """PyTorch's own CUDA graphs have one place for an input, whatever stream it is read on."""
    compiled = torch.compile(soften, mode="reduce-overhead", dynamic=False)
    x, by = torch.randn(9, 9, device=DEVICE), torch.tensor(1.0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        compiled(x, by)
        torch.cuda.synchronize()
        found = []
        for step in range(40):
            by.fill_(1.0 + step // 4)
            with torch.cuda.stream(streams[step % 2]):
                torch.cuda._sleep(1_000_000 * (1 + step % 2))
                found.append(compiled(x, by).clone())
        torch.cuda.synchronize()
        for step, each in enumerate(found):
            torch.testing.assert_close(each, soften(x, torch.tensor(1.0 + step // 4)))

    relocated.expect_all_captured()
    assert (rules.failures, rules.counts["placed_inputs"] > 0) == ({}, True)


def test_what_is_still_being_written_to_pinned_memory_is_waited_for(rules: Report) -> None:
    """By the stream, as the copy of an eager program would."""
    compiled = torch.compile(copied, mode="reduce-overhead", dynamic=False)
    x, by = torch.randn(9, 9, device=DEVICE), torch.zeros(9).pin_memory()
    with torch.no_grad():
        for step in range(8):
            source = torch.full((9,), float(step), device=DEVICE)
            torch.cuda._sleep(50_000_000)
            by.copy_(source, non_blocking=True)
            torch.testing.assert_close(compiled(x, by), copied(x, source))

    assert rules.failures == {}


def test_what_has_not_changed_is_not_sent(rules: Report) -> None:
    compiled = torch.compile(soften, mode="reduce-overhead", dynamic=False)
    x, by = torch.randn(9, 9, device=DEVICE), torch.tensor(2.0)
    with torch.no_grad():
        for _ in range(5):
            compiled(x, by)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                compiled(x, by)
            torch.cuda.synchronize()

    copies = [event.key for event in profile.key_averages() if "HtoD" in event.key]
    assert (copies, rules.counts["sent"]) == ([], 1)


def interleaved(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copy large values both ways in the midst of the work."""
    y = x @ one.to(x.device)
    early = y.sum(0).cpu()
    return early, (y.relu() @ other.to(x.device)).softmax(-1)


def test_inductor_has_copies_of_large_values_at_the_edges_of_a_graph(watched: Watched) -> None:
    """Which is why there is no rule for it."""
    compiled = torch.compile(interleaved, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for _ in range(ENOUGH):
            x, one, other = torch.randn(128, 128, device=DEVICE), torch.randn(128, 128), torch.randn(128, 128)
            expected = interleaved(x, one, other)
            torch.testing.assert_close(compiled(x, one, other), expected, rtol=1e-3, atol=1e-3)

    watched.expect(graphs=1)
    assert all(inputs.TOO_LARGE in reason for reason in watched.report.summary()["left_on_cpu"])


@pytest.mark.parametrize("mode", ["reduce-overhead", None])
def test_a_parameter_that_was_left_on_the_cpu_is_trained(watched: Watched, mode: str | None) -> None:
    """In modes with CUDA Graphs PyTorch 2.11 raises on the backward, or crashes."""
    compare((Learned,), DEVICE, ENOUGH, mode=mode)

    watched.expect()


def test_scalars_are_sent_within_a_capture_of_the_programs(relocated: Relocated, rules: Report) -> None:
    def scaled(x: torch.Tensor, scalars: list[torch.Tensor]) -> torch.Tensor:
        for each in scalars:
            x = x * each + 1
        return x

    compiled = torch.compile(scaled, mode="reduce-overhead", dynamic=False)
    x = torch.randn(100, device=DEVICE)
    scalars = [torch.tensor(1 + 0.1 * i) for i in range(9)] + [torch.tensor(2, dtype=torch.int64)]
    for _ in range(4):
        torch.testing.assert_close(compiled(x, scalars), scaled(x, scalars))
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        y = compiled(x, scalars)
    expected = scaled(x, scalars)
    for each in scalars:
        each.fill_(0)
    pinned = [torch.full((), 7.0).pin_memory() for _ in range(64)]  # would take memory that is free again
    for _ in range(3):
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y, expected)
    assert len(pinned) == 64
    assert (rules.failures, rules.counts["placed_inputs"] > 0) == ({}, True)
    assert relocated.report.fallbacks[IN_A_CAPTURE] == 1
