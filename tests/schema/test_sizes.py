"""Sizes of memory as people write them."""

from __future__ import annotations

import pytest

from pygraphd.schema.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), (" 256MB ", 256 * 10**6), ("1.5 GiB", 3 << 29), ("2k", 2000), ("1g", 10**9)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1TB", "1e9", "٣MB"])
def test_other_texts_are_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="give bytes, or 256MB, 1GiB"):
        parse_size(text)


def test_a_size_that_was_written_is_read_again() -> None:
    sizes = [2500, 10**6, 15 * 10**8]

    assert [parse_size(size_text(size)) for size in sizes] == sizes
    assert size_text(17) == "17 bytes"
