"""Which inputs a graph may write: those that Inductor names, those that are donated to a backward, or any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pygraphd.client.analysis.graph_facts import GraphFacts, facts_of
from pygraphd.client.backend.torch_private import PartitionMap
from pygraphd.client.backend.torch_private.autograd import donated_inputs

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("donated", "is_repeatable", "hides_writes", "written"),
    [
        (frozenset({2}), True, False, {0, 2}),
        (frozenset(), True, False, {0}),
        (None, True, False, None),
        (frozenset(), False, False, None),
        (frozenset(), True, True, None),
    ],
)
def test_any_input_may_be_written_where_that_is_not_known(
    donated: frozenset[int] | None, is_repeatable: bool, hides_writes: bool, written: set[int] | None
) -> None:
    compiled: Any = SimpleNamespace(
        text="", is_inference=True, collectives=(), is_repeatable=is_repeatable, hides_writes=hides_writes, is_vouched=True, is_backward=False, switches=(),
        may_draw=True, saved=frozenset(),
        donated_inputs=donated, mutated_inputs=(0,),
    )  # fmt: skip

    facts = facts_of(compiled)

    assert facts is not None
    assert facts.written == written


def test_an_input_that_another_partition_makes_may_be_written() -> None:
    maps = [PartitionMap((3, None, 1), ())]

    assert GraphFacts(written=frozenset({1})).of_partition(maps, 0).written == frozenset((1, 2))
    assert GraphFacts(written=None).of_partition(maps, 0).written is None


def test_outputs_that_depend_on_atomic_sums_are_known_of_each_partition() -> None:
    text = """
    def forward(self, at: "i64[4]", values: "f32[4, 8]"):
        embedding_dense_backward: "f32[9, 8]" = torch.ops.aten.embedding_dense_backward.default(values, at, 9, -1, False)
        return (values, embedding_dense_backward)
    """
    compiled: Any = SimpleNamespace(
        text=text, is_inference=True, collectives=(), is_repeatable=True, hides_writes=False, is_vouched=True, is_backward=False, switches=(),
        may_draw=True, saved=frozenset(),
        donated_inputs=frozenset(), mutated_inputs=(),
    )  # fmt: skip

    facts = facts_of(compiled)

    assert facts is not None
    assert facts.nondeterministic == {1}
    maps = [PartitionMap((), ((0,),)), PartitionMap((), ((), (1,)))]
    assert [facts.of_partition(maps, number).nondeterministic for number in range(2)] == [frozenset(), {1}]


@pytest.mark.parametrize(("is_repeatable", "mutated"), [(True, (1,)), (True, ()), (False, (1,))])
def test_overwritten_inputs_are_known_of_each_partition(
    is_repeatable: bool, mutated: tuple[int, ...]
) -> None:
    """A custom operator may do more with an input than the graph says, and an input that is copied to itself is only read."""
    text = """
    def forward(self, a: "f32[4]", b: "f32[4]"):
        copy_: "f32[4]" = torch.ops.aten.copy_.default(b, a);  b = a = copy_ = None
        return ()
    """
    compiled: Any = SimpleNamespace(
        text=text, is_inference=True, collectives=(), is_repeatable=is_repeatable, hides_writes=False, is_vouched=True, is_backward=False, switches=(),
        may_draw=True, saved=frozenset(),
        donated_inputs=frozenset(), mutated_inputs=mutated,
    )  # fmt: skip

    facts = facts_of(compiled)

    assert facts is not None
    assert facts.overwritten == (set(mutated) if is_repeatable else set())
    assert facts.of_partition([PartitionMap((None, 1), ())], 0).overwritten == facts.overwritten


@pytest.mark.parametrize(
    ("names", "donated"),
    [(["other"], None), (["pygraph donated: []"], set()), (["pygraph donated: [1, 4]"], {1, 4})],
)
def test_what_is_donated_is_known_of_graphs_that_were_compiled_with_pygraph(
    names: list[str], donated: set[int] | None
) -> None:
    assert (
        donated_inputs(SimpleNamespace(counter_deltas=dict.fromkeys(names, 1), source_code=""), "") == donated
    )
