"""Which donated inputs of a backward its code writes to: those whose memory it gives to other values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private.autograd import reused_inputs

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
