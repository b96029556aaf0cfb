"""Random arithmetic on CPU values of any type, before and after the rules: every output and every input has the same bits.

The graphs are those of AOTAutograd with Inductor's decompositions, and are run operator by operator, so that a program takes a
tenth of a second. What has two dimensions stands for the GPU's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from pygraphd.client.placement import constants, inputs

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

Tensors = list[torch.Tensor]

FLOATS = [
    0.0,
    -0.0,
    1.5,
    -2.25,
    float("nan"),
    -float("nan"),
    float("inf"),
    1e-40,
    1e-310,
    65504.0,
    1e308,
    0.1,
]
VALUES: dict[torch.dtype, list[Any]] = {
    **dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16), FLOATS),
    torch.int64: [0, 1, 2, -1, 2**63 - 1, -(2**63), 2**62 + 1, 2**53 + 1],
    torch.int32: [0, 1, 2, 2**31 - 1, -(2**31)],
    torch.int16: [0, 1, -1, 2**15 - 1, -(2**15)],
    torch.int8: [0, 1, -1, 127, -128],
    torch.uint8: [0, 1, 2, 255],
    torch.bool: [False, True],
    torch.complex64: [1 + 2j, complex(0.0, -0.0), complex(float("nan"), 1.0)],
}
ON_CPU: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, _: a + 1,
    lambda a, _: a * 0.1,
    lambda a, _: 1 / a,
    lambda a, _: 0.9**a,
    lambda a, _: a.sqrt(),
    lambda a, _: a.to(torch.float16),
    lambda a, _: a.to(torch.float32),
    lambda a, _: a.to(torch.int32),
    lambda a, _: a.clone(),
    lambda a, _: a > 1,
    lambda a, _: a.view(-1),
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: torch.where(a == b, a, b),
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a.copy_(b),
    lambda a, b: a.add_(b),
]
ON_GPU: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, v: x * v,
    lambda x, v: v - x,
    lambda x, v: x / v,
    lambda x, v: torch.where(x > 0, x, v),
    lambda x, v: x**v,
    lambda x, v: x + v.reshape(-1)[None],
    lambda x, v: x[v],
    lambda x, v: x * v.item(),
    lambda x, v: x + torch.tensor([0.1, -0.0, 7.0]).to(x.dtype)[None] * v,
    lambda x, _: x[:, torch.tensor([2, 0, 1])],
]
steps = st.lists(
    st.tuples(st.sampled_from(ON_CPU), st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=4
)
takes = st.lists(st.tuples(st.sampled_from(ON_GPU), st.integers(0, 9)), min_size=1, max_size=3)


@st.composite
def kept(draw: st.DrawFn) -> Tensors:
    """Return what a program keeps on the CPU; the last may be the first once more, or a view of it."""
    made = []
    for _ in range(draw(st.integers(1, 2))):
        dtype = draw(st.sampled_from(list(VALUES)))
        size = draw(st.sampled_from([(), (), (3,), (1,)]))
        numbers = st.sampled_from(VALUES[dtype])
        made.append(torch.tensor([draw(numbers) for _ in range(3)], dtype=dtype)[: size[0] if size else 1])
        made[-1] = made[-1].clone().reshape(size)
    shared = draw(st.sampled_from(["no", "same", "view"]))
    return made if shared == "no" else [*made, made[0] if shared == "same" else made[0].view(made[0].shape)]


def program(steps: list[Any], takes: list[Any]) -> Callable[..., list[torch.Tensor]]:
    def run(x: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        known_here = list(values)
        for compute, one, other in steps:
            known_here.append(compute(known_here[one % len(known_here)], known_here[other % len(known_here)]))
        for take, which in takes:
            x = take(x, known_here[which % len(known_here)])
        return [x, known_here[-1]]

    return run


def bits(tensors: list[Any]) -> list[Any]:
    return [
        (each.dtype, each.size(), each.stride(), each.contiguous().reshape(-1).view(torch.uint8).tolist())
        for each in tensors
        if isinstance(each, torch.Tensor)
    ]


class Compared:
    """A backend that runs each graph as it was and as the rules have made it, and sees that both do the same."""

    def __init__(self) -> None:
        self.broken: list[Exception] = []

    def __call__(self, module: torch.fx.GraphModule, _: object) -> Any:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        before = torch.fx.GraphModule(module, graph)
        try:
            self._apply(module.graph)
        except Exception as error:
            self.broken.append(error)
            raise

        def run(*given: Any) -> Any:
            copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
            expected = torch.fx.Interpreter(before).run(*copies)
            found = torch.fx.Interpreter(module).run(*given)
            assert bits(found) == bits(expected)
            assert bits(list(given)) == bits(copies)
            return found

        return make_boxed_func(run)

    @staticmethod
    def _apply(graph: torch.fx.Graph) -> None:
        inputs.place_inputs(graph)
        constants.place_constants(graph, lambda value, _: value.clone())
        graph.lint()


RAISED = (RuntimeError, IndexError, TypeError, NotImplementedError)
"""By types that an operator does not take and indices that are too large, as in eager mode; what was compared then has passed."""


def edit(value: torch.Tensor) -> None:
    memory = (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()
    memory[...] = memory.max()


@pytest.mark.slow
@given(kept(), steps, takes, st.sampled_from([torch.float32, torch.float16, torch.int64, torch.complex64]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bits_stay_what_they_are(
    standing_in: None, values: Tensors, steps: list[Any], takes: list[Any], dtype: torch.dtype
) -> None:
    torch._dynamo.reset()
    x = torch.tensor([[1.0, -0.0, 3.0], [-2.0, 5.0, 0.1], [float("inf"), 8.0, -7.0]]).to(dtype)
    compared = Compared()
    backend = aot_autograd(fw_compiler=compared, decompositions=select_decomp_table())
    compiled = torch.compile(program(steps, takes), backend=backend, dynamic=False)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for _ in range(2):
            with contextlib.suppress(*RAISED):
                compiled(x, *values)
            for each in values:
                edit(each)
    assert compared.broken == []
