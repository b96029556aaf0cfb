"""What a snapshot comes to, on made-up ones; the keys are those of `torch.cuda.memory_snapshot`."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tools.lab.snapshot import Owners, Part, brief, summarize

MB = 1 << 20
NOBODY = Owners({})
STATES = {"": "active_allocated", "f": "inactive", "w": "active_pending_free"}


def segment(start: int, *blocks: str, pool: tuple[int, int] = (0, 0), **more: Any) -> dict[str, Any]:
    """Return a segment of blocks like `3` (MB that are allocated), `3f` (free) and `3w` (waited for), one after the other."""
    made, address = [], start * MB
    for text in blocks:
        size, state = int(text.rstrip("fw")) * MB, STATES[text.lstrip("0123456789")]
        made.append({"address": address, "size": size, "requested_size": size, "state": state})
        address += size
    kind = "large" if address - start * MB > 2 * MB else "small"
    return {
        "address": start * MB,
        "total_size": address - start * MB,
        "segment_type": kind,
        "segment_pool_id": pool,
        "is_expandable": False,
        "blocks": made,
        **more,
    }


def in_mb(part: Part) -> tuple[int, ...]:
    segments, *sizes = dataclasses.astuple(part)
    assert not any(size % MB for size in sizes)
    return (segments, *(size // MB for size in sizes))


def test_what_is_free_beside_something_is_a_fragment_and_else_the_segment_is_empty() -> None:
    found = summarize(
        [
            segment(0, "3", "5f", "2w", "10f"),
            segment(100, "20f"),
            segment(200, "7", "23"),
            segment(300, "1", "1f"),
        ],
        NOBODY,
    )

    #                            segments, reserved, allocated, pending, fragments, the largest, empty
    assert in_mb(found.all) == (4, 72, 34, 2, 16, 10, 20)


def test_what_is_waited_for_does_not_make_a_segment_empty() -> None:
    assert in_mb(summarize([segment(0, "1w", "1f")], NOBODY).all) == (1, 2, 0, 1, 1, 1, 0)


def test_pools_are_those_of_their_numbers() -> None:
    found = summarize(
        [segment(0, "2"), segment(10, "3", pool=(0, 4)), segment(20, "1f", "4", pool=(0, 4))], NOBODY
    )

    assert {name: in_mb(part) for name, part in found.by_pool.items()} == {
        "default": (1, 2, 2, 0, 0, 0, 0),
        "0.4": (2, 8, 7, 0, 1, 1, 0),
    }


def test_classes_are_the_allocators() -> None:
    found = summarize(
        [
            segment(0, "1", "1f"),
            segment(10, "9", "11f"),
            segment(40, "22"),
            segment(80, "20", is_expandable=True),
        ],
        NOBODY,
    )

    assert {name: part.reserved // MB for name, part in found.by_class.items()} == {
        "small": 2, "20 MB": 20, "of its own": 22, "expandable": 20,
    }  # fmt: skip


def test_a_block_is_whose_address_lies_in_it() -> None:
    owners = Owners({0: "parameters", 5 * MB - 1: "gradients", 4 * MB: "gradients", 7 * MB: "inputs"})

    found = summarize([segment(0, "4", "1", "2", "6f")], owners)

    assert found.by_owner == {"parameters": 4 * MB, "others": 2 * MB, "gradients": MB}


def test_a_line_for_each_segment_says_what_lies_in_it() -> None:
    lines = brief([segment(50, "20f", pool=(1, 2)), segment(0, "1", "1w")], Owners({0: "kept"}))

    assert lines == [
        f"default, small, {2 * MB}: {MB}ke {MB}wait",
        f"1.2, 20 MB, {20 * MB}: {20 * MB}free",
    ]


BLOCKS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(["", "f", "w"])).map(lambda block: f"{block[0]}{block[1]}"),
    min_size=1,
    max_size=6,
)


@given(st.lists(st.tuples(BLOCKS, st.sampled_from([(0, 0), (0, 1), (1, 0)])), max_size=6))
def test_nothing_is_lost_or_counted_twice(made: list[tuple[list[str], tuple[int, int]]]) -> None:
    segments = [segment(1000 * index, *blocks, pool=pool) for index, (blocks, pool) in enumerate(made)]
    owners = Owners({1000 * index * MB: f"owner {index % 2}" for index in range(len(made))})

    found = summarize(segments, owners)

    whole = found.all
    assert whole.reserved == sum(each["total_size"] for each in segments)
    assert whole.reserved == whole.allocated + whole.pending + whole.fragments + whole.empty
    assert sum(found.by_owner.values()) == whole.allocated
    for parts in (found.by_pool, found.by_class):
        total = Part()
        for part in parts.values():
            total = total.plus(part)
        assert total == whole
