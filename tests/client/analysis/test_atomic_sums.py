"""Outputs of printed graphs whose bits may differ from run to run."""

from __future__ import annotations

import pytest

from pygraphd.client.analysis.atomic_sums import atomic_outputs

GRAPH = """\
class GraphModule(torch.nn.Module):
    def forward(self, rows: "f32[9, 8]", at: "i64[4]", values: "f32[4, 8]"):
        # File: model.py:7 in forward, code: return y.index_add(0, at, values)
        mul: "f32[4, 8]" = torch.ops.aten.mul.Tensor(values, 2)
        full: "f32[9, 8]" = torch.ops.aten.full.default([9, 8], 0, device = device(type='cuda', index=0))
        total: "f32[9, 8]" = torch.ops.aten.{call};  at = mul = None
        cast: "bf16[9, 8]" = torch.ops.prims.convert_element_type.default({used}, torch.bfloat16)
        neg: "f32[4, 8]" = torch.ops.aten.neg.default(values);  values = None
        return (neg, cast, {used})
"""

SUMS = [
    "index_put.default(full, [at], mul, True)",
    "_unsafe_index_put.default(full, [at], mul, True)",
    "_unsafe_masked_index_put_accumulate.default(full, mask, [at], mul)",
    "embedding_dense_backward.default(mul, at, 9, -1, False)",
    "scatter_add.default(full, 0, at, mul)",
    "scatter_reduce.two(full, 0, at, mul, 'sum')",
    "index_add.default(full, 0, at, mul)",
    "index_reduce.default(full, 0, at, mul, 'mean')",
]
NO_SUMS = [
    "index_put.default(full, [at], mul)",
    "index_put.default(full, [at], mul, False)",
    "index_select.default(rows, 0, at)",
    "scatter.src(full, 0, at, mul)",
    "sum.dim_IntList(rows, [0], True)",
]


@pytest.mark.parametrize("call", SUMS)
def test_outputs_that_depend_on_a_sum_are_named(call: str) -> None:
    assert atomic_outputs(GRAPH.format(call=call, used="total")) == {1, 2}


@pytest.mark.parametrize("call", NO_SUMS)
def test_other_operators_add_in_a_fixed_order(call: str) -> None:
    assert atomic_outputs(GRAPH.format(call=call, used="total")) == frozenset()


def test_an_operator_in_place_changes_its_argument() -> None:
    text = GRAPH.format(call="index_put_.default(full, [at], mul, True)", used="full")

    assert atomic_outputs(text) == {1, 2}


def test_text_that_is_not_understood_names_nothing() -> None:
    assert atomic_outputs("def f(x):\n    return x") == frozenset()
