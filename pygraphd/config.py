"""The daemon's settings: flags over environment over TOML file over default, each value with its origin."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pygraphd.errors import UsageError
from pygraphd.schema.durations import parse_duration
from pygraphd.schema.messages import MAX_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG_LEVELS = ("debug", "info", "warning")
_DEFAULTS = {"idle_exit": 30 * 60.0, "housekeeping": 60.0, "lease": 60.0, "log": "info"}
_ENVIRONMENT_PREFIX = "PYGRAPHD_"

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
    hit counts are written. `lease`: the time for which a process may measure a graph alone, until it renews the lease. `log`: the least
    severe level that is logged, one of `LOG_LEVELS`.
    """

    idle_exit: Setting[float]
    housekeeping: Setting[float]
    lease: Setting[float]
    log: Setting[str]

    def __post_init__(self) -> None:
        if self.housekeeping.value < 0.1:
            raise UsageError(f"housekeeping ({self.housekeeping.origin}): at least 0.1 seconds")
        if not 0.1 <= self.lease.value <= MAX_LEASE_S:
            raise UsageError(f"lease ({self.lease.origin}): between 0.1 seconds and {MAX_LEASE_S:.0f}")

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings by name, as JSON has them."""
        return {
            field.name: dataclasses.asdict(getattr(self, field.name)) for field in dataclasses.fields(self)
        }


def load_config(environ: Mapping[str, str], flags: Mapping[str, str | None]) -> Config:
    """Return the settings in force; raises UsageError naming the file, variable or flag that is wrong."""
    sources = (_from_flags(flags), _from_environment(environ), _from_file(config_file(environ)))
    return Config(**{name: _first(name, default, sources) for name, default in _DEFAULTS.items()})


def config_file(environ: Mapping[str, str]) -> Path | None:
    """Return where the TOML file would be, or None for a user without a home."""
    if folder := environ.get("PYGRAPHD_HOME"):
        return Path(folder).absolute() / "config.toml"
    base = environ.get("XDG_CONFIG_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "pygraphd" / "config.toml"
    home = environ.get("HOME")
    return Path(home) / ".config" / "pygraphd" / "config.toml" if home else None


def _first(name: str, default: Any, sources: tuple[Mapping[str, Setting[Any]], ...]) -> Setting[Any]:
    return next((source[name] for source in sources if name in source), Setting(default, "default"))


def _from_flags(flags: Mapping[str, str | None]) -> dict[str, Setting[Any]]:
    origins = {name: f"--{name.replace('_', '-')}" for name in flags}
    return {name: _setting(name, text, origins[name]) for name, text in flags.items() if text is not None}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting[Any]]:
    variables = {name: f"{_ENVIRONMENT_PREFIX}{name.upper()}" for name in _DEFAULTS}
    return {name: _setting(name, environ[key], key) for name, key in variables.items() if environ.get(key)}


def _from_file(path: Path | None) -> dict[str, Setting[Any]]:
    values = {} if path is None else _read_toml(path)
    for name in values:
        if name not in _DEFAULTS:
            raise UsageError(f"{path}: unknown setting {name!r}, known are {', '.join(_DEFAULTS)}")
    return {name: _setting(name, value, f"{path}: {name}") for name, value in values.items()}


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def _setting(name: str, value: object, origin: str) -> Setting[Any]:
    return _level(value, origin) if name == "log" else _duration(value, origin)


def _level(value: object, origin: str) -> Setting[str]:
    if value not in LOG_LEVELS:
        raise UsageError(f"{origin}: expected one of {', '.join(LOG_LEVELS)}, got {value!r:.40}")
    return Setting(str(value), origin)


def _duration(value: object, origin: str) -> Setting[float]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f"{origin}: expected a length of time, got {type(value).__name__}")
    try:
        return Setting(parse_duration(str(value)), origin)
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from error
