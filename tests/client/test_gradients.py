"""Which outputs of a backward are gradients of parameters, told from texts as FX prints them."""

from __future__ import annotations

import pytest

from pygraphd.client.attention import State
from pygraphd.client.gradients import Inputs, gradients_of_parameters, inputs_of
from pygraphd.client.graph_facts import GraphFacts, PartitionMap

FORWARD = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 8][8, 1]cpu", primals_2: "Sym(s16)", primals_3, primals_4: "f32[4][1]cpu"):
        return (add, primals_1)
"""


def backward(*returned: str) -> str:
    """Return the text of a backward that returns these."""
    return f'    def forward(self, tangents_1: "f32[4][1]cpu"):\n        return ({", ".join(returned)})\n'


def test_the_inputs_of_a_forward_are_counted_whatever_their_types_look_like() -> None:
    assert inputs_of(FORWARD, (0, 3)) == Inputs(4, frozenset({0, 3}))


@pytest.mark.parametrize("text", ["", FORWARD * 2, "def forward(x)"])
def test_a_text_that_is_not_understood_says_nothing(text: str) -> None:
    assert inputs_of(text, (0,)) is None


def test_gradients_are_those_of_what_stays_and_of_nothing_else() -> None:
    forward = Inputs(4, frozenset({0, 2, 3}))

    assert gradients_of_parameters(forward, backward("mm", "sum_1", "None", "add")) == {0, 3}


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (None, backward("a", "b")),
        (Inputs(3, frozenset({0})), backward("a", "b")),
        (Inputs(2, frozenset({0})), ""),
        (Inputs(2, frozenset({5})), backward("a", "b")),
        (Inputs(2, frozenset({0})), backward("a", "b") * 2),
    ],
    ids=["no forward", "another number", "no text", "no such output", "two graphs"],
)
def test_none_are_named_where_forward_and_backward_do_not_fit(forward: Inputs | None, text: str) -> None:
    assert gradients_of_parameters(forward, text) == frozenset()


def test_one_output_is_an_output() -> None:
    assert gradients_of_parameters(Inputs(1, frozenset({0})), backward("mm,")) == {0}


def test_a_partition_has_numbers_of_its_own() -> None:
    whole = GraphFacts(frozenset({1, 2}), frozenset({0}), State((2,), (0,), (1,), (5,), (4, 6)))
    maps = PartitionMap((4, 5), ((), (2,), (7, 0))), PartitionMap((None, 6, 4), ((1,),))

    assert whole.of_partition((), 0) == whole
    assert whole.of_partition(maps, 0) == GraphFacts(
        frozenset({1}),
        frozenset({2}),
        State((1,), (2,), (), (1,), (0,)),
    )
    assert whole.of_partition(maps, 1) == GraphFacts(
        frozenset({0}),
        frozenset(),
        State((), (), (0,), (), (2, 1)),
    )
