"""Outputs that hold nothing, told from the text of a graph; whatever is not understood is compared as any other."""

from __future__ import annotations

import pytest

from pygraphd.client.undefined import undefined_outputs

FLASH, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


def graph(
    operator: str, arguments: str, returned: str = "getitem, mul, getitem_6, getitem_7, getitem_1, getitem_2"
) -> str:
    items = "\n".join(
        f'        getitem_{i}: "i64[][]cuda:0" = {operator}_1[{i}]{";  " + operator + "_1 = None" if i == 7 else ""}'
        for i in (1, 2, 6, 7)
    )
    return f"""\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[4][1]cuda:0"):
        # File: model.py:14 in forward, code: return (y[6], x)
        mul: "f32[4][1]cuda:0" = torch.ops.aten.mul.Tensor(primals_1, 2);  primals_1 = None
        {operator}_1 = torch.ops.aten.{operator}.default({arguments});  q = k = None
        getitem: "bf16[2, 8][8, 1]cuda:0" = {operator}_1[0]
{items}
        return ({returned})
        """


@pytest.mark.parametrize(
    ("operator", "arguments", "expected"),
    [
        (FLASH, "q, k, v", {2, 3}),
        (FLASH, "q, k, v, 0.0, True, scale = 0.125", {2, 3}),
        (FLASH, "q, k, v, dropout_p = 0.0", {2, 3}),
        (FLASH, "q, k, v, 0.1, True", {3}),
        (FLASH, "q, k, v, is_causal = True, dropout_p = 0.1", {3}),
        (FLASH, "q, k, v, p", {3}),
        (CUDNN, "q, k, v, None, True", {2, 3}),
        (CUDNN, "q, k, v, mask, True, 0.0, True, scale = 0.125", {2, 3}),
        (CUDNN, "q, k, v, None, True, 0.1", set()),
        (EFFICIENT, "q, k, v, None, True, 0.0", {5}),
        (EFFICIENT, "q, k, v, None, True, 0.1", set()),
        ("_scaled_dot_product_fused_attention_overrideable", "q, k, v", set()),
    ],
)
def test_what_attention_says_of_random_numbers_that_it_did_not_draw(
    operator: str, arguments: str, expected: set[int]
) -> None:
    assert undefined_outputs(graph(operator, arguments)) == expected


def test_of_several_each_is_told_by_its_own_dropout() -> None:
    text = (
        graph(CUDNN, "q, k, v, None, True, 0.1", "getitem_6")
        .replace("getitem", "first")
        .replace("_1 =", "_2 =")
    )
    body = graph(CUDNN, "q, k, v, None, True", "first_6, getitem_6, None")
    text = (
        text.replace(f"{CUDNN}_1[", f"{CUDNN}_2[").split("        return")[0]
        + body.split('"f32[4][1]cuda:0"):\n')[1]
    )

    assert undefined_outputs(text) == {1}


def test_one_output_alone() -> None:
    assert undefined_outputs(graph(FLASH, "q, k, v", "getitem_6,")) == {0}


@pytest.mark.parametrize("text", ["", "    return (a, b)", "        return a"])
def test_a_graph_without_attention_has_none(text: str) -> None:
    assert undefined_outputs(text) == frozenset()


def test_what_is_not_understood_is_left_out() -> None:
    text = graph(FLASH, "q, k, v")

    assert undefined_outputs(text + "\n        return (getitem_6)\n") == frozenset()
    assert undefined_outputs(text.replace(".default(", ".out(")) == frozenset()
    assert undefined_outputs(text.replace("[6]", ".rng_state")) == {3}
