"""What attention says of random numbers, told from the text of a graph; whatever is not understood is left out."""

from __future__ import annotations

import pytest

from pygraphd.client.analysis.attention_rng import RngState, has_rng_state, rng_state_of, undefined_outputs

FLASH, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
LENGTHS = "_efficient_attention_forward"


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
        (LENGTHS, "q, k, v, None, begins, begins, 7, 7, 0.0, 0, True, scale = 0.5", {4, 5}),
        (LENGTHS, "q, k, v, None, begins, begins, 7, 7, 0.1, 0, True", {4}),
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


# --- what lies on the CPU or on the GPU --------------------------------------------------------------------------


def forward(*dropouts: float, returned: str = "") -> str:
    lines = ['def forward(self, q: "f32[2][1]cuda:0", s0: "Sym(s0)"):']
    names = []
    for i, dropout in enumerate(dropouts):
        lines += [
            f"        # File: model.py:{i}, code: getitem_{i}_2 = attend(q)",
            f"        call_{i} = torch.ops.aten.{EFFICIENT}.default(q, q, q, None, True, {dropout}, scale = 0.5)",
            *(f'        getitem_{i}_{item}: "i64[][]cuda:0" = call_{i}[{item}]' for item in range(3)),
            f'        getitem_{i}_3: "i64[][]cuda:0" = call_{i}[3];  call_{i} = None',
        ]
        names += [f"getitem_{i}_0", f"getitem_{i}_3", f"getitem_{i}_2"]
    lines.append(f"        return ({returned or ', '.join(names)})")
    return "\n".join(lines)


def backward(*dropouts: float, taken: str = "") -> str:
    inputs = ", ".join(f'o_{i}: "i64[][]cuda:0", s_{i}: "i64[][]cuda:0"' for i, _ in enumerate(dropouts))
    lines = [f'def forward(self, q: "f32[2][1]cuda:0", {inputs}, tangents_1: "f32[2][1]cuda:0"):']
    for i, dropout in enumerate(dropouts):
        arguments = f"tangents_1, q, q, q, None, q, q, s_{i}, {taken or f'o_{i}'}, {dropout}, [True, False, True, False]"
        lines += [
            f"        call_{i} = torch.ops.aten.{EFFICIENT}_backward.default({arguments}, True);  s_{i} = o_{i} = None",
            f'        getitem_{i}: "f32[2][1]cuda:0" = call_{i}[0];  call_{i} = None',
        ]
    return "\n".join(
        [*lines, f"        return ({', '.join(f'getitem_{i}' for i, _ in enumerate(dropouts))},)"]
    )


def test_a_forward_hands_over_seeds_and_offsets() -> None:
    assert rng_state_of(forward(0.1, 0.0, 0.2)) == RngState(seeds=(2, 8), offsets=(1, 7), idle_outputs=(5, 4))
    assert rng_state_of(forward(0.1, returned="getitem_0_0")) == RngState()


def test_a_backward_takes_them() -> None:
    assert rng_state_of(backward(0.1, 0.0)) == RngState(inputs=(2, 1), idle_inputs=(4, 3))


def test_attention_over_several_lengths_has_its_own_arguments() -> None:
    """Its lengths, which are numbers, may be handed over as well."""
    ahead = forward(0.1, 0.0).replace("q, q, q, None, True, ", "q, q, q, None, begins, begins, s0, 7, ")
    ahead = ahead.replace(EFFICIENT, LENGTHS).replace(", scale", ", 0, True, scale")
    assert rng_state_of(ahead) == RngState(seeds=(2,), offsets=(1,), idle_outputs=(5, 4))

    behind = backward(0.1, 0.0).replace(f"{EFFICIENT}_backward", "_efficient_attention_backward")
    for number, dropout in enumerate((0.1, 0.0)):
        given = f"tangents_1, q, q, q, None, q, q, s_{number}, o_{number}, {dropout}, [True, False, True, False], True"
        assert given in behind
        arguments = f"tangents_1, q, q, q, None, q, begins, begins, 7, 7, q, {dropout}, s_{number}, o_{number}, 0, False"
        behind = behind.replace(given, arguments)
    assert rng_state_of(behind) == RngState(inputs=(2, 1), idle_inputs=(4, 3))


@pytest.mark.parametrize(
    "text",
    [
        forward(0.1, returned="getitem_0_2, getitem_0_2, getitem_0_3"),
        forward(0.1).replace("        return", "        sin = torch.ops.aten.sin.default(getitem_0_2)\n        return"),
        forward(0.1).replace(EFFICIENT, "_efficient_attention_of_another_kind"),
        forward(0.1).replace(".default(", ".out("),
        forward(0.1).split("        return")[0],
        forward(0.1).replace("def forward(self", "def run(self"),
        backward(0.1, taken="q"),
        backward(0.1, taken="tangents_1"),
        backward(0.1, taken="made_here"),
        backward(0.1).replace("return (getitem_0", "return (s_0"),
        forward(0.1) + "\n" + backward(0.1),
    ],
    ids=[
        "returned twice", "computed with", "another operator", "another overload", "no return", "no signature", "an input of others",
        "the gradient", "not an input", "returned by the backward", "two graphs",
    ],
)  # fmt: skip
def test_whoever_does_something_else_with_them_is_not_understood(text: str) -> None:
    assert has_rng_state(text)
    assert rng_state_of(text) is None


def test_other_graphs_have_none() -> None:
    for text in ("", graph(FLASH, "q, k, v")):
        assert not has_rng_state(text)
        assert rng_state_of(text) == RngState()
        assert not RngState()
