"""Small CPU inputs in real compilations: sent before the part that is captured, safe from what Inductor does with memory and caches.

There is no GPU here. Every device is taken for one, by the rules and by what Inductor splits graphs by, so that parts are made as
for a GPU; they run on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor import ir, lowering
from torch._inductor.fx_passes import post_grad
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.utils import run_and_get_code

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import fx_utils, inputs, pipeline
from pygraphd.client.placement.pipeline import FILES
from tests.support.placement.graphs import COPY
from tests.support.placement.with_rules import with_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.fx import Graph

    from pygraphd.client.common.report import Report
    from tests.support.user_program import Run

pytestmark = pytest.mark.torch

FEW = inputs.FEW_SCALARS
SPLIT = "reduce-overhead"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """Have the rules and Inductor take this CPU for a GPU; return what the rules report to."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fx_utils, "is_gpu", lambda device: True)
    monkeypatch.setattr(BaseSchedulerNode, "is_gpu", lambda node: True)
    with with_rules() as report:
        yield report


def soften(x: torch.Tensor, temperature: torch.Tensor, rate: float) -> torch.Tensor:
    return (x @ x / temperature * rate) @ x


def test_values_are_sent_before_what_is_captured_and_seen_when_they_have_changed(added: Report) -> None:
    compiled = torch.compile(soften, mode=SPLIT, dynamic=True)
    x, temperature = torch.randn(4, 4), torch.tensor(3.0)

    result, (code,) = run_and_get_code(compiled, x, temperature, 0.5)
    torch.testing.assert_close(result, soften(x, temperature, 0.5))
    for step in range(4):
        temperature.numpy()[...] += 1
        for _ in range(3):
            torch.testing.assert_close(
                compiled(x, temperature, 0.5 + step), soften(x, temperature, 0.5 + step)
            )

    captured, _, call = code.partition("class Runner")
    assert captured.count("def partition_") == call.count("self.partitions[") == 1
    assert "pygraphd.sent" not in captured
    assert call.index("pygraphd.sent") < call.index("self.partitions[0](")
    assert (added.counts["placed_inputs"], added.counts["sent"], added.failures) == (2, 9, {})


def test_what_is_pinned_is_copied_at_every_call(added: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether memory is pinned is known at run time only, and here there is none."""
    compiled = torch.compile(soften, mode=SPLIT, dynamic=True)
    x, temperature = torch.randn(4, 4), torch.tensor(3.0)
    pinned = temperature.data_ptr()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == pinned)

    for step in range(3):
        temperature.fill_(1.0 + step)
        torch.testing.assert_close(compiled(x, temperature, 0.5), soften(x, temperature, 0.5))

    assert (added.counts["placed_inputs"] > 0, added.counts["sent"]) == (True, 0)


@pytest.fixture
def _with_copy() -> Iterator[None]:
    """Have the last input of a graph be copied to where it is, which Inductor would see through by itself."""

    def copy_input(graph: Graph) -> None:
        value = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            copy = graph.call_function(COPY, (value, torch.device("cpu")))
        copy.meta = dict(value.meta)
        value.replace_all_uses_with(copy, lambda user: user is not copy)

    remove = torch_private.add_pass(copy_input, (__file__,))
    yield
    remove()


def shifted(x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.relu() + by).cos() @ x, by.reshape(2, 8)


@pytest.mark.usefixtures("_with_copy")
def test_nothing_is_written_to_what_was_sent(added: Report) -> None:
    """Inductor would put the sum where the copy lies, for nobody needs that any more. And what is returned the user changes."""
    compiled = torch.compile(shifted, mode=SPLIT, dynamic=False)
    x, by = torch.randn(4, 4), torch.ones(4, 4)

    for _ in range(3):
        for result, expected in zip(compiled(x, by), shifted(x, by), strict=True):
            torch.testing.assert_close(result, expected)
            result.data.zero_() if result.data_ptr() != by.data_ptr() else None

    assert (added.counts["placed_inputs"], added.counts["sent"]) == (1, 1)


@pytest.mark.slow
def test_what_inductor_has_cached_takes_new_values(added: Report) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for number in range(2):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(soften, mode=SPLIT, dynamic=False)
        temperature = torch.tensor(2.0 + number)
        for _ in range(2):
            temperature += 1
            expected = soften(x, temperature, 0.5)
            torch.testing.assert_close(compiled(x, temperature, 0.5), expected)
            (found,) = torch.autograd.grad(compiled(x, temperature, 0.5).sum(), x)
            torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0])

        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert (hits > 0) == (number > 0)
        assert added.counts["placed_inputs"] == 2 * (number + 1)  # in the forward and in the backward
    assert added.failures == {}


class Left(torch.nn.Module):  # type: ignore[misc]
    """A model that keeps on the CPU what is usually left there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("order", torch.tensor([2, 1, 0, 3]))
        self.bias = torch.nn.Parameter(torch.tensor(0.5))
        self.step = torch.tensor(1)
        self.rate = np.float64(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (((x @ x) * self.scale + self.bias)[self.order] * self.rate / self.step) @ x


def by_array(model: Left) -> None:
    model.scale.numpy()[...] = 7.0


def by_rate(model: Left) -> None:
    model.rate = np.float64(0.2)


def by_step(model: Left) -> None:
    model.step += 1


def by_data(model: Left) -> None:
    model.bias.data.fill_(3.0)


def by_order(model: Left) -> None:
    model.order.copy_(model.order.flip(0))


def by_assignment(model: Left) -> None:
    model.scale = torch.tensor(5.0)


def test_what_a_model_keeps_on_the_cpu_is_seen_as_it_is(added: Report) -> None:
    model, x = Left(), torch.randn(4, 4)
    compiled = torch.compile(model, mode=SPLIT, dynamic=False)
    changes: list[Callable[[Left], None]] = [by_array, by_rate, by_step, by_data, by_order, by_assignment]

    for change in (by_step, *changes, *changes):
        change(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))

    assert added.counts["placed_inputs"] >= 5
    assert added.failures == {}


def test_a_mode_that_captures_nothing_is_left_alone(added: Report) -> None:
    x, temperature = torch.randn(4, 4), torch.tensor(3.0)

    _, (code,) = run_and_get_code(torch.compile(soften, dynamic=False), x, temperature, 0.5)

    assert "pygraphd" not in code
    assert any(pipeline.NOT_SPLIT in reason for reason in added.summary()["left_on_cpu"])


@pytest.fixture
def traced() -> Any:
    return torch.fx.experimental.proxy_tensor.make_fx(soften)(torch.randn(4, 4), torch.tensor(3.0), 0.5)


def test_what_others_are_to_load_knows_nothing_of_us(added: Report, traced: Any, tmp_path: Path) -> None:
    x, temperature = torch.randn(4, 4), torch.tensor(3.0)
    with inductor_config.patch({"triton.cudagraphs": True, "graph_partition": True}):
        artifact: Any = torch._inductor.standalone_compile(traced, [x, temperature, 0.5])
        found = artifact(x, temperature, 0.5)

    torch.testing.assert_close(found, soften(x, temperature, 0.5))
    assert added.counts["placed_inputs"] == 0
    assert any(pipeline.FOR_ELSEWHERE in reason for reason in added.summary()["left_on_cpu"])


def test_caches_tell_what_others_load_from_what_is_run_here() -> None:
    made = torch_private.pass_after(None, lambda graph: None, FILES)

    def standalone_compile() -> object:
        return made.uuid()

    assert made.uuid() == made.uuid() != standalone_compile()
    assert not torch_private.is_for_export()
    with inductor_config.patch(cpp_wrapper=True):
        assert torch_private.is_for_export()
    assert inputs.MAX_INPUT_BYTES <= inputs.MAX_BYTES_OF_GRAPH


# The CPU is taken for a GPU, as above.
PROGRAM = """
import sys
import torch
import torch._inductor.compile_fx
from pygraphd.client.placement import inputs
from pygraphd.client.placement import fx_utils

inputs.FEW_SCALARS = 0
fx_utils.is_gpu = lambda device: True
compiled = torch.compile(lambda x, by: (x @ x / by) @ x, backend="pygraph", mode="reduce-overhead", dynamic=False)
x, by = torch.randn(4, 4), torch.tensor({value})
for _ in range(3):
    by.numpy()[...] += 1
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, by), (x @ x / by) @ x)
print("compiled", torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_the_next_process_finds_it_in_the_caches_and_sends_and_says_the_same(
    run: Run, tmp_path: Path
) -> None:
    outcomes = []
    for value in (1.0, 2.0):
        program = PROGRAM.format(value=value)
        outcomes.append(run(program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor")))
        summary = outcomes[-1].summary
        assert (summary["placed_inputs"], summary["sent"]) == (1, 3)
        assert not [text for text in summary["failures"] if not text.startswith("daemon: ")]

    first, second = outcomes
    assert ("compiled 1" in first.output, "compiled 0" in second.output) == (True, True)
    left = first.summary["left_on_cpu"]
    assert any(inputs.OTHER_USE in reason and "program.py:" in reason for reason in left)
    # The programs lie in folders of their own: what is said is the line that was compiled.
    assert second.summary["left_on_cpu"] == left


def scaled(x: torch.Tensor, rates: tuple[float, ...]) -> torch.Tensor:
    y = x @ x
    for rate in rates:
        y = y / rate
    return y @ x


@pytest.fixture
def _with_copies_as_to_a_gpu(standing_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Inductor generate copies to this CPU, which stands in for a GPU, as it does copies to a GPU."""

    def copied(x: Any, device: torch.device, non_blocking: bool) -> Any:
        return ir.TensorBox.create(ir.DeviceCopy.create(x, device, non_blocking))

    monkeypatch.delitem(post_grad.noop_registry, COPY)
    monkeypatch.setitem(lowering.lowerings, COPY, copied)


@pytest.mark.usefixtures("_with_copies_as_to_a_gpu")
@pytest.mark.parametrize("count", [1, 3])
def test_a_few_scalars_that_are_sent_as_they_are_need_no_cpp_code(count: int) -> None:
    x, rates = torch.randn(4, 4), tuple(1.5 + number for number in range(count))

    with with_rules(FEW, split=True) as report:
        compiled = torch.compile(scaled, dynamic=True)
        result, (code,) = run_and_get_code(compiled, x, rates)
        torch.testing.assert_close(result, scaled(x, rates))
        others = tuple(rate + 1 for rate in rates)
        torch.testing.assert_close(compiled(x, others), scaled(x, others))

    assert code.count(".copy_(") == 1
    assert code.count("async_compile.cpp") == 1  # the divisions
    assert (report.counts["placed_inputs"], report.failures) == (count, {})
