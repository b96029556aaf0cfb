from __future__ import annotations

import pytest

from pygraphd.schema.durations import human_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("30d", 2592000), (" 2w ", 1209600)],
)
def test_parse(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1y", "1 d", "inf", "nan", "1e9", "9" * 10, "30d2h"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is no length of time: give seconds, or 30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (86400, "1d"), (8640000, "100d")],
)
def test_human(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text
