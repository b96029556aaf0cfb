"""Which donated inputs of a backward its code writes to, and in which of its inputs its outputs may lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private.autograd import returned_sizes, reused_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = pytest.mark.torch

CODE = """
def partition_0(args):
    one, buf1 = args
    buf2 = reinterpret_tensor(buf1, (8, 1), (1, 1), 0); del buf1  # reuse
    return (buf2, )
class Runner:
    def call(self, args):
        zero, one, two, three = args
        buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
        buf1 = reinterpret_tensor(two, (8, ), (1, ), 0)  # alias
        partition0_args = [one, buf1]
        buf3 = three; del three  # reuse
"""


def test_a_backward_writes_to_the_inputs_that_its_code_says_it_reuses() -> None:
    seen: list[tuple[set[int], set[int]]] = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        code = compiled.source_code
        original()
        run = compiled.current_callable

        def call(inputs: list[Any]) -> Any:
            given, before = list(inputs), [each.clone() for each in inputs]
            outputs = run(inputs)
            changed = {at for at, each in enumerate(given) if not torch.equal(each, before[at])}
            seen.append((changed, set(reused_inputs(code, frozenset(range(len(given)))))))
            return outputs

        if graph_kwargs["is_backward"]:
            compiled.current_callable = call

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(x @ weight) @ weight).sum()

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    try:
        torch._dynamo.reset()
        torch.compile(step)(torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)).backward()
    finally:
        uninstall()
        torch._dynamo.reset()

    ((changed, reused),) = seen
    assert len(changed) == 1
    assert changed == reused


@pytest.mark.parametrize(
    ("code", "reused"),
    [
        (CODE, {2, 3}),
        (CODE.replace("def call", "def inductor_entry"), {0, 2, 3}),
        (CODE + "\ndef true_graph_0(args):\n    pass", {0, 2, 3}),
        (CODE + "    buf4 = alloc_from_pool(pool0, 0)", {0, 2, 3}),
        (CODE.replace("zero, one, two, three = args", "zero, = args"), {0, 2, 3}),
    ],
    ids=["alias in a partition", "no wrapper", "subgraph", "planned memory", "other inputs"],
)
def test_all_donated_inputs_count_where_code_is_not_understood(code: str, reused: set[int]) -> None:
    assert reused_inputs(code, frozenset((0, 2, 3))) == reused


# --- outputs that lie in inputs -----------------------------------------------------------------------------------

TEXT = """
class GraphModule(torch.nn.Module):
    def forward(self, zero: "f32[8]cuda", one: "f32[3, 5][5, 1]cuda", two: "f32[2, 4]", three: "i64[]"):
        return (add, mul)
"""
RETURNS = CODE + "        return (buf0, reinterpret_tensor(buf3, (), ()), None, )\n"


class Normalised(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


class Scaled(torch.nn.Module):  # type: ignore[misc]
    """Its gradient is computed in place in the sums that its forward has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.cumsum(x, 0)


class Returned(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved = x.sin()
        ctx.save_for_backward(saved)
        return saved.sum(0)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0]


class SavedIsGradient(torch.nn.Module):  # type: ignore[misc]
    """A function of the user's returns what its forward has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = (torch.nn.Parameter(torch.randn(size)) for size in ((6, 7), (7,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Returned.apply(self.weight) * self.scale.sin() * x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "size", "are_returned"),
    [
        (Normalised, (2, 3, 6, 6), False),
        (Scaled, (6, 8), True),
        (SavedIsGradient, (7,), True),
    ],
)
def test_the_inputs_are_known_that_outputs_of_a_backward_lie_in(
    module: type[torch.nn.Module], size: tuple[int, ...], *, are_returned: bool
) -> None:
    seen: list[tuple[set[int], frozenset[int] | None]] = []

    def note(original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        predicted = torch_private.facts(compiled, graph_kwargs).returned_sizes
        original()
        run = compiled.current_callable

        def call(inputs: list[Any]) -> Any:
            kept = [*inputs]  # or an output may come to lie where an input has been
            given = {each.untyped_storage().data_ptr(): each.numel() for each in kept}
            outputs = run(inputs)
            at = {each.untyped_storage().data_ptr() for each in outputs if each is not None}
            seen.append(({given[each] for each in at & given.keys()}, predicted))
            return outputs

        if graph_kwargs["is_backward"]:
            compiled.current_callable = call

    uninstall = torch_private.install(note, lambda original, runnable, kwargs: original(runnable, **kwargs))
    try:
        torch._dynamo.reset()
        torch.compile(module())(torch.randn(size)).sum().backward()
    finally:
        uninstall()
        torch._dynamo.reset()

    ((returned, predicted),) = seen
    assert predicted is not None
    assert bool(returned) == bool(predicted) == are_returned
    assert returned <= predicted


@pytest.mark.parametrize(
    ("code", "text", "sizes"),
    [
        (RETURNS, TEXT, {1}),
        (RETURNS.replace("return (buf0", "return (buf2"), TEXT, {1, 8}),
        (RETURNS.replace("buf3 = three; del three", "buf3 = one[0]"), TEXT, {15}),
        (RETURNS.replace("buf3 = three; del three", "buf3 = torch.ops.aten.view_as_real.default(one)"), TEXT, {15}),
        (RETURNS.replace("buf3 = three; del three", "buf3 = extern_kernels.mm(one, three)"), TEXT, set()),
        (RETURNS.replace("(buf0, reinterpret_tensor(buf3, (), ())", "(buf0, one"), TEXT, {15}),
        (RETURNS.replace("buf3 = three; del three", "buf3 = torch.ops.mylib.roll.default(one)"), TEXT, {15}),
        (RETURNS.replace("buf3 = three; del three", "buf3 = torch.ops.aten.sort.default(one)"), TEXT, set()),
        (RETURNS.replace("buf3 = three; del three", "buf3 = torch.ops.aten._unsafe_view.default(one, [])"), TEXT, {15}),
        (RETURNS.replace("three", "partition_rows"), TEXT.replace("three", "partition_rows"), {1}),
        (RETURNS.replace("three", "empty_strided_like"), TEXT.replace("three", "empty_strided_like"), {1}),
        ("# as a call( of tl\n    return (x + 1)\n" + RETURNS, TEXT, {1}),
        (RETURNS, TEXT.replace('three: "i64[]"', 'three: "i64[s0]"'), None),
        (RETURNS, "", None),
        (CODE, TEXT, None),
        (RETURNS.replace("def call", "def inductor_entry"), TEXT, None),
        (RETURNS + "\ndef true_graph_0(args):\n    pass", TEXT, None),
        (RETURNS + "    buf4 = alloc_from_pool(pool0, 0)", TEXT, None),
    ],
    ids=[
        "reused", "through a partition", "item", "view", "new memory", "input", "custom operator", "operator", "view by its name alone",
        "name like a partition's", "name like a call", "kernel's text", "unknown size",
        "no graph", "no outputs", "no wrapper", "subgraph", "planned memory",
    ],
)  # fmt: skip
def test_where_outputs_of_a_backward_may_lie(code: str, text: str, sizes: set[int] | None) -> None:
    assert returned_sizes(code, text) == sizes
