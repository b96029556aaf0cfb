"""Which operators may run inside a CUDA graph, by their names."""

from __future__ import annotations

import pytest

from pygraphd.client.backend.vouched_operators import OF_OTHERS, OF_PYTORCH, hides_writes, not_vouched
from pygraphd.client.frontend import settings


@pytest.mark.parametrize("entry", sorted(OF_OTHERS | OF_PYTORCH))
def test_what_is_listed_is_vouched_for_and_nothing_that_only_resembles_it(entry: str) -> None:
    operator = entry if "::" in entry else f"{entry}::forward"
    longer = f"{entry}_of_mine" if "::" in entry else f"{entry}_of_mine::forward"

    assert not_vouched([operator, longer, "mine::forward"]) == tuple(sorted([longer, "mine::forward"]))


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("aten::_print", "it prints"),
        ("higher_order::cond", "it reads its condition"),
        ("inductor::resize_storage_bytes_", "it changes a storage"),
        ("profiler::_record_function_enter_new", "it keeps a record"),
        ("bitsandbytes::int8_double_quant", "it reads what it has found"),
    ],
)
def test_what_does_something_on_the_host_is_not_vouched_for(operator: str, reason: str) -> None:
    assert not_vouched([operator]) == (operator,), reason


def test_the_user_vouches_for_namespaces_and_for_operators() -> None:
    operators = ["mine::a", "mine::b", "theirs::a", "theirs::b", "higher_order::cond"]

    assert not_vouched(operators, {"mine", "theirs::b"}) == ("higher_order::cond", "theirs::a")


def test_the_option_takes_names_and_tells_of_what_is_none() -> None:
    read = settings.read({settings.GRAPH_OPS: " mine, theirs::op ,,a::b::c,3d, x.y"})

    assert read.graph_ops == {"mine", "theirs::op"}
    assert [each.partition(" is not understood")[0] for each in read.misread] == [
        "PYGRAPH_GRAPH_OPS: 3d",
        "PYGRAPH_GRAPH_OPS: a::b::c",
        "PYGRAPH_GRAPH_OPS: x.y",
    ]
    assert settings.read({}).graph_ops == frozenset()


@pytest.mark.parametrize(
    ("operators", "hides"),
    [
        (["aten::copy_", "higher_order::triton_kernel_wrapper_mutation"], False),
        (["aten::mm", "higher_order::invoke_subgraph"], True),
        (["flash_attn::_flash_attn_forward"], False),
        (["flash_attn_3::fwd"], True),
        ([], False),
    ],
)
def test_operators_that_write_more_than_inductor_lists_are_known(operators: list[str], hides: bool) -> None:
    assert hides_writes(operators) is hides
