from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.config import _DEFAULTS, Fault, Setting, config_file, load_config, shown, survey, variable
from pygraphd.errors import Exit, UsageError
from pygraphd.schema.durations import parse_duration
from pygraphd.schema.sizes import parse_size


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PYGRAPHD_HOME": str(tmp_path)}


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(UsageError, match=r"config.toml: cannot be read: is not a regular file"):
        load_config({"PYGRAPHD_HOME": str(tmp_path)}, {})


def test_defaults(environ: dict[str, str]) -> None:
    assert load_config(environ, {}).idle_exit == Setting(1800.0, "default")


def test_each_source_beats_the_next(environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('idle_exit = "5m"\nhousekeeping = 7\n')
    assert load_config(environ, {}).idle_exit == Setting(300.0, f"{file}: idle_exit")
    environ["PYGRAPHD_IDLE_EXIT"] = "10"
    assert load_config(environ, {}).idle_exit == Setting(10.0, "PYGRAPHD_IDLE_EXIT")
    config = load_config(environ, {"idle_exit": "0"})
    assert config.idle_exit == Setting(0.0, "--idle-exit")
    assert config.housekeeping == Setting(7.0, f"{file}: housekeeping")


def test_a_flag_that_was_not_given_hides_nothing(environ: dict[str, str]) -> None:
    environ["PYGRAPHD_IDLE_EXIT"] = "10"
    assert load_config(environ, {"idle_exit": None}).idle_exit.value == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("idle_exit = ", "not TOML"),
        ("idle_exti = 5", "unknown setting 'idle_exti', known are idle_exit, housekeeping, lease, log"),
        ("idle_exit = true", "idle_exit: expected a length of time, got bool"),
        ("idle_exit = -1", "'-1' is no length of time"),
        ('idle_exit = "soon"', "'soon' is no length of time"),
        ("idle_exit = nan", "'nan' is no length of time"),
        ('log = "loud"', "log: expected one of debug, info, warning, got 'loud'"),
        ("log = 3", "log: expected one of debug, info, warning, got 3"),
        ("housekeeping = 0", "at least 0.1 seconds"),
        ("idle_exit = '\udcff'", "not TOML"),
        (f"lease = {'[' * 100_000}", "not TOML"),
        *((f"{name} = {'9' * 5000}", "not TOML") for name in _DEFAULTS),
        *((f"{name} = 0x{'f' * 5000}", f"{name}: ") for name in _DEFAULTS),
        *((f"{name} = {'[' * 50}{']' * 50}", f"{name}: ") for name in _DEFAULTS),
    ],
)
def test_a_bad_file_is_named(environ: dict[str, str], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=message) as caught:
        load_config(environ, {})
    assert str(tmp_path / "config.toml") in str(caught.value)
    assert caught.value.exit_code == Exit.USAGE


def test_the_level_of_the_log_is_a_word(environ: dict[str, str]) -> None:
    assert load_config(environ, {}).log == Setting("info", "default")
    assert load_config(environ | {"PYGRAPHD_LOG": "debug"}, {}).log == Setting("debug", "PYGRAPHD_LOG")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "package"),
        ("0", "none"),
        ("Off", "none"),
        ("none", "none"),
        ("/opt/decisions", "/opt/decisions"),
    ],
)
def test_what_is_shipped_is_a_switch_or_a_folder(environ: dict[str, str], text: str, value: str) -> None:
    assert load_config(environ, {}).shipped == Setting("package", "default")
    assert load_config(environ | {"PYGRAPHD_SHIPPED": text}, {}).shipped == Setting(value, "PYGRAPHD_SHIPPED")
    if text.isdecimal():  # in a file it is a number
        path = Path(environ["PYGRAPHD_HOME"]) / "config.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"shipped = {text}\n")
        assert load_config(environ, {}).shipped.value == value


def test_a_bad_variable_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="PYGRAPHD_IDLE_EXIT: 'x' is no length of time"):
        load_config(environ | {"PYGRAPHD_IDLE_EXIT": "x"}, {})


def test_where_the_file_is_looked_for() -> None:
    assert config_file({"XDG_CONFIG_HOME": "/c", "HOME": "/h"}) == Path("/c/pygraphd/config.toml")
    assert config_file({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}) == Path(
        "/h/.config/pygraphd/config.toml"
    )
    assert config_file({}) is None
    assert load_config({}, {}).idle_exit.origin == "default"


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000000", 10**6), ("256MB", 256 * 10**6), ("1.5 GiB", 3 * 2**29), ("2g", 2 * 10**9)],
)
def test_a_size_has_units(environ: dict[str, str], text: str, size: int) -> None:
    environ["PYGRAPHD_MAX_SIZE"] = text
    assert load_config(environ, {}).max_size == Setting(size, "PYGRAPHD_MAX_SIZE")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("max_size", "much", "'much' is no size: give bytes, or 256MB, 1GiB; 0 for no limit"),
        ("max_size", "-1", "is no size"),
        ("max_size", "4k", "at least 1 MB, or 0 for no limit"),
        ("metrics_port", "65536", "is no port: give 1 to 65535, or 0 for none"),
        ("metrics_port", "http", "is no port"),
        ("max_unused", "x", "no length of time"),
        ("shipped", "decisions", "'decisions' is neither 0 nor 1 nor the absolute path of a folder"),
    ],
)
def test_a_bad_limit_is_named(environ: dict[str, str], name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(environ | {variable(name): text}, {})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("idle_exit", 0.0, "never"),
        ("lease", 60.0, "1m"),
        ("lease", 90.0, "90s"),
        ("lease", 0.25, "0.25s"),
        ("idle_exit", 5400.0, "90m"),
        ("idle_exit", 36 * 3600.0, "36h"),
        ("idle_exit", 3600.5, "3600.5s"),
        ("housekeeping", 1e6, "1000000s"),
        ("max_size", 0, "no limit"),
        ("max_size", 256 * 10**6, "256 MB"),
        ("max_size", 2**30, "1 GiB"),
        ("max_size", 1500 * 10**6, "1500 MB"),
        ("max_size", 123_456_789, "123456789 bytes"),
        ("max_unused", 90 * 86400.0, "90d"),
        ("metrics_port", 9100, "9100"),
        ("of another version", [1], "[1]"),
    ],
)
def test_a_value_is_shown_in_its_unit(name: str, value: object, text: str) -> None:
    assert shown(name, value) == text


@given(st.floats(0.000001, 9e8), st.integers(10**6, 10**12))
def test_no_digit_of_a_value_is_lost(seconds: float, size: int) -> None:
    assert parse_duration(shown("lease", seconds)) == pytest.approx(seconds, abs=1e-6)
    assert parse_size(shown("max_size", size).removesuffix(" bytes")) == size


def test_a_survey_has_what_is_valid_and_all_that_is_not(environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("lease = 'x'\nfoo = 1\nmax_size = 5\nlog = 'debug'")
    made = survey(environ | {"PYGRAPHD_IDLE_EXIT": "soon", "PYGRAPHD_LEASE": "30"}, {})

    assert made.found["log"] == Setting("debug", f"{file}: log")
    assert made.found["lease"] == Setting(30.0, "PYGRAPHD_LEASE")  # what it beats is a fault all the same
    assert made.found["housekeeping"] == Setting(60.0, "default")
    assert isinstance(made.found["idle_exit"], Fault)
    assert [fault.origin for fault in made.faults] == [
        "PYGRAPHD_IDLE_EXIT",
        f"{file}: foo",
        f"{file}: lease",
        f"{file}: max_size",
    ]
    assert made.settings()["max_size"] == {
        "value": None,
        "origin": f"{file}: max_size",
        "error": f"max_size ({file}: max_size): at least 1 MB, or 0 for no limit",
    }


@pytest.mark.parametrize("name", _DEFAULTS)
@pytest.mark.parametrize(
    "text", ["9" * 5000, f"{'9' * 5000}s", "\u0665" * 5000, "1e999", "\x1b[31m", "[" * 100_000]
)
def test_no_text_of_a_variable_or_flag_is_a_traceback(environ: dict[str, str], name: str, text: str) -> None:
    with pytest.raises(UsageError, match=variable(name)):
        load_config({**environ, variable(name): text}, {})
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        load_config(environ, {name: text})
    assert survey({**environ, variable(name): text}, {}).faults


def test_a_port_may_have_zeros_before_it(environ: dict[str, str]) -> None:
    assert load_config(environ, {"metrics_port": "000080"}).metrics_port.value == 80
