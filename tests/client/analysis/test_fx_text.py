"""Inputs, outputs and overwritten inputs of printed graphs."""

from __future__ import annotations

import pytest

from pygraphd.client.analysis.fx_text import overwritten_inputs, returned, taken

GRAPH = """\
class GraphModule(torch.nn.Module):
    def forward(self, weight: "f32[9, 8]", moment: "f32[9, 8]", rows: "f32[9, 8]", grad: "f32[9, 8]"):
        # File: step.py:7 in step, code: rows.copy_(grad); moment = None
        mul: "f32[9, 8]" = torch.ops.aten.mul.Tensor(moment, 0.9);  grad = None
        sub: "f32[9, 8]" = torch.ops.aten.sub.Tensor(weight, mul)
        slice_1: "f32[2, 8]" = torch.ops.aten.slice.Tensor(rows, 0, 0, 2)
        {writes}
        return (sub, None)
"""
WHOLE = [
    'copy_: "f32[9, 8]" = torch.ops.aten.copy_.default(weight, sub);  weight = copy_ = None',
    "copy_ = torch.ops.aten.copy_.default(weight, sub);  weight = sub = copy_ = None",
]
IN_PART = [
    'copy_: "f32[2, 8]" = torch.ops.aten.copy_.default(slice_1, mul);  slice_1 = copy_ = None',
    'put: "f32[9, 8]" = torch.ops.aten.index_put_.default(rows, [at], mul);  rows = put = None',
    '# copy_: "f32[9, 8]" = torch.ops.aten.copy_.default(weight, sub);  weight = copy_ = None',
]


def test_inputs_of_an_operator_on_lists_are_overwritten() -> None:
    writes = (
        "each = torch.ops.aten._foreach_addcdiv_.Scalar([weight, rows], [grad, mul], [sub, sub], [1, 1]);"
    )
    assert overwritten_inputs(GRAPH.format(writes=writes)) == {0, 2}
    assert overwritten_inputs(GRAPH.format(writes=writes.replace("div_", "div"))) == frozenset()


@pytest.mark.parametrize("writes", WHOLE)
def test_an_input_that_is_copied_to_is_overwritten(writes: str) -> None:
    assert overwritten_inputs(GRAPH.format(writes=writes)) == {0}


@pytest.mark.parametrize("writes", IN_PART)
def test_an_input_that_is_written_in_part_is_not(writes: str) -> None:
    assert overwritten_inputs(GRAPH.format(writes=writes)) == frozenset()


@pytest.mark.parametrize(
    "call",
    [
        "index_put_.default",
        "index_put.default",
        "slice_scatter.default",
        "masked_scatter.default",
        "add_.Tensor",
    ],
)
def test_no_input_of_a_graph_that_writes_to_parts_is(call: str) -> None:
    """What is copied to the input then may be the input itself, under the name of the operator's result."""
    writes = f"put = torch.ops.aten.{call}(weight, [at], mul)\n        {WHOLE[0].replace('sub', 'put')}"
    assert overwritten_inputs(GRAPH.format(writes=writes)) == frozenset()


def test_inputs_and_outputs_are_named_in_order() -> None:
    text = GRAPH.format(writes=WHOLE[0])
    assert taken(text) == ["weight", "moment", "rows", "grad"]
    assert returned(text) == ["sub", "None"]


@pytest.mark.parametrize("text", ["", "def f(x):\n    return x", GRAPH + GRAPH])
def test_text_that_is_not_understood_names_nothing(text: str) -> None:
    assert taken(text) is None
    assert overwritten_inputs(text.replace("{writes}", WHOLE[0])) == frozenset()
