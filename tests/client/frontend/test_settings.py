"""What the environment says, and what it says wrongly."""

from __future__ import annotations

import pytest

from pygraphd.cli import summary_files
from pygraphd.client.decisions.trust import Trust
from pygraphd.client.dispatch.shapes import Bounds
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.settings import (
    COLLECTIVES,
    DISABLE,
    MAX_AGE,
    MEMORY,
    PLACEMENT,
    READONLY,
    RECHECK,
    REFRESH,
    RELOCATE,
    SIZE_CALLS,
    SIZES,
    TRUST,
    Options,
)


@pytest.mark.parametrize("value", ["1", "on", "TRUE", " yes "])
def test_switches_are_on(value: str) -> None:
    read = settings.read({READONLY: value, REFRESH: value})
    assert read == Options(readonly=True, refresh=True)


@pytest.mark.parametrize("value", ["", "0", "off", "False", "no"])
def test_switches_are_off(value: str) -> None:
    assert settings.read({READONLY: value, REFRESH: value}) == settings.read({}) == Options()
    assert not settings.is_disabled({DISABLE: value})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("", True), ("1", True), ("on", True), ("0", False), ("off", False), (" No ", False)],
)
def test_graphs_are_relocated_with_collectives_and_values_placed_unless_that_is_off(
    value: str, wanted: bool
) -> None:
    off = Options(relocate=wanted, placement=wanted, collectives=wanted)
    assert settings.read({RELOCATE: value}) == off
    assert settings.read({PLACEMENT: value}) == Options(placement=wanted)
    assert settings.read({COLLECTIVES: value}) == Options(collectives=wanted)


@pytest.mark.parametrize("name", [RELOCATE, PLACEMENT, COLLECTIVES])
def test_what_is_on_by_default_stays_on_where_its_switch_is_not_understood(name: str) -> None:
    said = f"{name}=perhaps is not understood: set it to 1 or 0"

    assert settings.read({name: "perhaps"}) == Options(misread=(said,))


def test_what_is_not_understood_is_named_and_changes_nothing() -> None:
    read = settings.read({READONLY: "perhaps", REFRESH: "1"})

    assert read == Options(
        refresh=True, misread=("PYGRAPH_READONLY=perhaps is not understood: set it to 1 or 0",)
    )


@pytest.mark.parametrize(
    ("value", "trust"),
    [("", Trust.VALIDATE), ("validate", Trust.VALIDATE), ("ALL", Trust.ALL), (" local ", Trust.LOCAL)],
)
def test_trust(value: str, trust: Trust) -> None:
    assert settings.read({TRUST: value}) == Options(trust=trust)


def test_a_trust_that_is_not_understood_is_the_usual_one() -> None:
    said = "PYGRAPH_TRUST=none is not understood: set it to all, validate, local"

    assert settings.read({TRUST: "none"}) == Options(misread=(said,))


@pytest.mark.parametrize(
    ("value", "sizes"), [("", Bounds()), ("0", Bounds(sizes=0)), (" 12 ", Bounds(sizes=12))]
)
def test_how_many_sizes_are_decided_apart(value: str, sizes: Bounds) -> None:
    assert settings.read({SIZES: value}) == Options(sizes=sizes)


@pytest.mark.parametrize(
    ("name", "value", "least"), [(SIZES, "-1", 0), (SIZE_CALLS, "0", 1), (SIZES, "few", 0)]
)
def test_a_number_of_sizes_that_is_not_understood_is_the_usual_one(name: str, value: str, least: int) -> None:
    said = f"{name}={value} is not understood: set it to a whole number from {least} to 10000"

    assert settings.read({name: value}) == Options(misread=(said,))


@pytest.mark.parametrize("value", ["1", "true", "please"])
def test_who_wants_to_be_rid_of_us_is(value: str) -> None:
    assert settings.is_disabled({DISABLE: value})
    assert not settings.is_disabled({})


@pytest.mark.parametrize(("value", "seconds"), [("", 600), ("0", 0), ("0.5", 0.5), (" 3600 ", 3600)])
def test_seconds_between_looks(value: str, seconds: float) -> None:
    assert settings.read({RECHECK: value}) == Options(recheck_s=seconds)


@pytest.mark.parametrize("value", ["often", "-1", "nan", "inf", "1e300"])
def test_seconds_that_are_not_understood_are_the_usual_ones(value: str) -> None:
    said = f"PYGRAPH_RECHECK_S: {value!r} is no length of time: give seconds, or 30m, 12h, 30d, 4w"

    assert settings.read({RECHECK: value}) == Options(misread=(said,))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("", 30 * 86400.0), ("30d", 30 * 86400.0), ("12h", 43200.0), (" 90 ", 90.0), ("0", 0.0), ("0d", 0.0)],
)
def test_entries_have_an_age_limit(value: str, seconds: float) -> None:
    assert settings.read({MAX_AGE: value}) == Options(max_age_s=seconds)


@pytest.mark.parametrize("value", ["-1d", "soon", "inf", "1y"])
def test_an_age_limit_that_is_not_understood_is_named_and_the_default_stands(value: str) -> None:
    read = settings.read({MAX_AGE: value})

    assert read.max_age_s == 30 * 86400.0
    (said,) = read.misread
    assert said.startswith(f"PYGRAPH_MAX_AGE: {value!r} is no length of time: ")


@pytest.mark.parametrize(("value", "level"), [("", None), ("0", None), ("Info", "info"), ("debug", "debug")])
def test_what_is_logged(value: str, level: str | None) -> None:
    assert settings.read({"PYGRAPH_LOG": value}) == Options(log=level)


def test_a_level_that_is_not_understood_is_named_and_nothing_is_printed() -> None:
    said = "PYGRAPH_LOG=all is not understood: set it to debug, info, warning"

    assert settings.read({"PYGRAPH_LOG": "all"}) == Options(misread=(said,))


@pytest.mark.parametrize(("value", "size"), [("", 0), ("0", 0), ("512MB", 512 * 10**6), ("4 GiB", 4 << 30)])
def test_memory_of_recordings_is_bounded_as_asked(value: str, size: int) -> None:
    assert settings.read({MEMORY: value}) == Options(memory_bytes=size)


def test_a_bound_of_memory_that_is_not_understood_is_none() -> None:
    said = "PYGRAPH_MEMORY: 'half' is no size: give bytes, or 256MB, 1GiB; 0 for no limit"

    assert settings.read({MEMORY: "half"}) == Options(misread=(said,))


def test_the_command_run_takes_read_only_as_programs_do() -> None:
    """It cannot import these settings, which would import torch."""
    assert summary_files._ON == settings._ON
