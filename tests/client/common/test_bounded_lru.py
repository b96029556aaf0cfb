"""The dict that keeps what was set last."""

from __future__ import annotations

from pygraphd.client.common.bounded_lru import BoundedLRU


def test_the_least_recently_set_entry_goes_first() -> None:
    kept = BoundedLRU[str, int](2)

    for number, key in enumerate("abacb"):
        kept[key] = number

    assert kept == {"c": 3, "b": 4}


def test_reading_is_no_use() -> None:
    kept = BoundedLRU[str, int](1)
    kept["a"] = 1
    assert kept.get("a") == kept["a"] == 1

    kept["b"] = 2

    assert list(kept) == ["b"]
