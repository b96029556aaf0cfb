"""The daemon's settings: flags over environment over TOML file over default, each value with its origin."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pygraphd.errors import UsageError
from pygraphd.remedies import unreadable
from pygraphd.schema import shipped
from pygraphd.schema.durations import parse_duration
from pygraphd.schema.messages import MAX_LEASE_S
from pygraphd.schema.ownership import open_regular
from pygraphd.schema.sizes import parse_size, size_text
from pygraphd.team_url import TeamUrl, read_team_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOG_LEVELS = ("debug", "info", "warning")
_DEFAULTS = {
    "idle_exit": 30 * 60.0,
    "housekeeping": 60.0,
    "lease": 60.0,
    "log": "info",
    "max_size": 256 * 10**6,
    "max_unused": 90 * 86400.0,
    "metrics_port": 0,
    "team_url": TeamUrl(""),
    "shipped": shipped.PACKAGE,
}
_ENVIRONMENT_PREFIX = "PYGRAPHD_"
MIN_SIZE = 10**6
"""Bytes below which a size limit is refused: the tables alone take some hundred kilobytes."""

_TIME_UNITS = {"d": 86400, "h": 3600, "m": 60}
_SIZE_UNITS = {" GB": 10**9, " GiB": 2**30, " MB": 10**6, " MiB": 2**20, " kB": 10**3, " KiB": 2**10}

_PORT = re.compile(r"0*[0-9]{1,5}")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Setting(Generic[_T]):
    """One value, and where it came from: a flag, a variable, a file, or "default"."""

    value: _T
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, lengths of time in seconds.

    `idle_exit`: the daemon ends after this time without a request; 0: never. `housekeeping`: the interval at which the spool is read and
    limits are applied. `lease`: the time for which a process may measure a graph alone, until it renews the lease. `log`: the least
    severe level that is logged, one of `LOG_LEVELS`. `max_size`: bytes of the database's used pages above which the entries unused
    for longest are deleted. `max_unused`: the time after the last use at which an entry is deleted. `metrics_port`: the port of
    127.0.0.1 that serves `/metrics`. 0 in these three: no limit, no port. `team_url`: the PostgreSQL database that a team shares; empty:
    none. `shipped`: whose decisions rank below the user's own: those of the package, none, or those in a folder of exports.
    """

    idle_exit: Setting[float]
    housekeeping: Setting[float]
    lease: Setting[float]
    log: Setting[str]
    max_size: Setting[int]
    max_unused: Setting[float]
    metrics_port: Setting[int]
    team_url: Setting[TeamUrl]
    shipped: Setting[str]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings by name, as JSON has them: without the password of a URL."""
        return {field.name: _as_json(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True)
class Fault:
    """What keeps a daemon from starting: a value that is not valid, an unknown name, a file that cannot be read. `text` names the origin."""

    origin: str
    text: str


@dataclass(frozen=True, slots=True)
class Survey:
    """All settings by name, each with its value or with what is wrong with it, and all faults, those of values that another beats included."""

    found: dict[str, Setting[Any] | Fault]
    faults: tuple[Fault, ...]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings as `Config.settings` does; one that is not valid has no value, but an error."""
        return {name: _as_json(each) for name, each in self.found.items()}


def load_config(environ: Mapping[str, str], flags: Mapping[str, str | None]) -> Config:
    """Return the settings in force; raises UsageError naming the file, variable or flag that is wrong."""
    made = survey(environ, flags)
    if made.faults:
        raise UsageError(made.faults[0].text)
    return Config(**{name: each for name, each in made.found.items() if isinstance(each, Setting)})


def survey(environ: Mapping[str, str], flags: Mapping[str, str | None]) -> Survey:
    """Return the settings, be they valid or not; raises nothing."""
    found: dict[str, Setting[Any] | Fault] = {}
    faults: list[Fault] = []
    for name, value, origin in _given(environ, flags, faults):
        each: Setting[Any] | Fault
        try:
            each = _setting(name, value, origin)
        except UsageError as error:
            each = Fault(origin, str(error))
            faults.append(each)
        found.setdefault(name, each)
    for name, default in _DEFAULTS.items():
        each = found.get(name, Setting(default, "default"))
        if isinstance(each, Setting) and (problem := _why_out_of_range(name, each)):
            each = Fault(each.origin, problem)
            faults.append(each)
        found[name] = each
    return Survey({name: found[name] for name in _DEFAULTS}, tuple(faults))


def shipped_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of shipped decisions that a daemon started now would read; None: none, or settings are not valid."""
    try:
        return shipped.folder(load_config(environ, {}).shipped.value)
    except UsageError:
        return None


def config_file(environ: Mapping[str, str]) -> Path | None:
    """Return where the TOML file would be, or None for a user without a home."""
    if folder := environ.get("PYGRAPHD_HOME"):
        return Path(folder).absolute() / "config.toml"
    base = environ.get("XDG_CONFIG_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "pygraphd" / "config.toml"
    home = environ.get("HOME")
    return Path(home) / ".config" / "pygraphd" / "config.toml" if home else None


def flag(name: str) -> str:
    """Return the option of `pygraphd start` for a setting."""
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{_ENVIRONMENT_PREFIX}{name.upper()}"


def flag_variable(name: str) -> str:
    """Return the variable in which `pygraphd start` hands an option on to the daemon that it starts, where its words must not show it."""
    return f"{_ENVIRONMENT_PREFIX}FLAG_{name.upper()}"


def shown(name: str, value: object) -> str:
    """Return the value of a setting for people, to the last digit; one of an unknown name, as another version may have, as it is."""
    if name == "team_url" and not value:
        return "none"
    if isinstance(value, str) or name not in _DEFAULTS:
        return str(value)
    assert isinstance(value, int | float)
    if not value:
        return {"idle_exit": "never", "metrics_port": "none"}.get(name, "no limit")
    if name == "metrics_port":
        return str(value)
    return _exact(value, _SIZE_UNITS, " bytes") if name == "max_size" else _exact(value, _TIME_UNITS, "s")


def _exact(value: float, units: Mapping[str, int], otherwise: str) -> str:
    """Return a value as a whole number of the largest unit of which it is one, else with all its digits."""
    unit = next((name for name, factor in units.items() if value >= factor and value % factor == 0), None)
    if unit is None:
        return f"{f'{value:.6f}'.rstrip('0').rstrip('.')}{otherwise}"
    return f"{int(value // units[unit])}{unit}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, TeamUrl) else value


def _as_json(each: Setting[Any] | Fault) -> dict[str, Any]:
    if isinstance(each, Fault):
        return {"value": None, "origin": each.origin, "error": each.text}
    return {"value": _plain(each.value), "origin": each.origin}


def _given(
    environ: Mapping[str, str], flags: Mapping[str, str | None], faults: list[Fault]
) -> Iterator[tuple[str, object, str]]:
    """Yield name, value and origin of all that is set, the strongest source first; add faults of the file."""
    yield from ((name, text, flag(name)) for name, text in flags.items() if text is not None)
    variables = {name: variable(name) for name in _DEFAULTS}
    yield from ((name, environ[key], key) for name, key in variables.items() if environ.get(key))
    path = config_file(environ)
    try:
        values = {} if path is None else _read_toml(path)
    except UsageError as error:
        faults.append(Fault(str(path), str(error)))
        return
    for name in (each for each in values if each not in _DEFAULTS):
        known = ", ".join(_DEFAULTS)
        faults.append(Fault(f"{path}: {name}", f"{path}: unknown setting {name!r}, known are {known}"))
    yield from ((name, value, f"{path}: {name}") for name, value in values.items() if name in _DEFAULTS)


def _why_out_of_range(name: str, setting: Setting[Any]) -> str | None:
    value = setting.value
    if name == "housekeeping" and value < 0.1:
        return f"housekeeping ({setting.origin}): at least 0.1 seconds"
    if name == "lease" and not 0.1 <= value <= MAX_LEASE_S:
        return f"lease ({setting.origin}): between 0.1 seconds and {MAX_LEASE_S:.0f}"
    if name == "max_size" and 0 < value < MIN_SIZE:
        return f"max_size ({setting.origin}): at least {size_text(MIN_SIZE)}, or 0 for no limit"
    return None


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as stream:
            return tomllib.load(stream)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(unreadable(path, error)) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def _setting(name: str, value: object, origin: str) -> Setting[Any]:
    readers: dict[str, Callable[[object, str], Setting[Any]]] = {
        "log": _level,
        "max_size": _size,
        "metrics_port": _port,
        "team_url": _team_url,
        "shipped": _shipped,
    }
    try:
        return readers.get(name, _duration)(value, origin)
    except (ValueError, OverflowError, RecursionError) as error:  # a number of too many digits is one, too
        raise UsageError(f"{origin}: {error}") from error


def _size(value: object, origin: str) -> Setting[int]:
    return Setting(parse_size("" if isinstance(value, bool) else str(value)), origin)


def _port(value: object, origin: str) -> Setting[int]:
    text = "" if isinstance(value, bool) else str(value).strip()
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise UsageError(f"{origin}: {text!r:.40} is no port: give 1 to 65535, or 0 for none")
    return Setting(int(text), origin)


def _team_url(value: object, origin: str) -> Setting[TeamUrl]:
    if not isinstance(value, str):
        raise UsageError(f"{origin}: expected a URL, got {type(value).__name__}")
    return Setting(read_team_url(value, origin), origin)


def _shipped(value: object, origin: str) -> Setting[str]:
    if not isinstance(value, bool | int | str):
        raise UsageError(f"{origin}: expected true, false or a folder, got {type(value).__name__}")
    return Setting(shipped.setting(str(value)), origin)


def _level(value: object, origin: str) -> Setting[str]:
    if value not in LOG_LEVELS:
        raise UsageError(f"{origin}: expected one of {', '.join(LOG_LEVELS)}, got {value!r:.40}")
    return Setting(str(value), origin)


def _duration(value: object, origin: str) -> Setting[float]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f"{origin}: expected a length of time, got {type(value).__name__}")
    return Setting(parse_duration(str(value)), origin)
