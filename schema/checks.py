"""Checks of single values. An error names the field and the expected value, so that an existing object is always valid."""

from __future__ import annotations

import re

_DIGEST = re.compile(r"[0-9a-f]{64}")


class InvalidMessageError(ValueError):
    """A value does not fit its field; the text says which and why. Raised for the peer's data and our own alike."""


def check_text(name: str, value: object, maximum: int) -> str:
    """Return `value` if it is a string of at most `maximum` characters without control characters."""
    if not isinstance(value, str):
        raise InvalidMessageError(f"{name}: expected text, got {type(value).__name__}")
    if len(value) > maximum:
        raise InvalidMessageError(f"{name}: {len(value)} characters, at most {maximum} allowed")
    # Texts go to terminals, and into answers and log lines of one line each.
    if not value.isprintable():
        raise InvalidMessageError(f"{name}: control characters are not allowed")
    return value


def check_int(name: str, value: object, maximum: int, minimum: int = 0) -> int:
    """Return `value` if it is an integer (no bool) in `minimum..maximum`."""
    # bool is a subclass of int: `true` in JSON would pass for 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMessageError(f"{name}: expected an integer, got {type(value).__name__}")
    if not minimum <= value <= maximum:
        raise InvalidMessageError(f"{name}: {value!s:.40} is outside {minimum}..{maximum}")
    return value


def check_number(name: str, value: object, maximum: float) -> float:
    """Return `value` as a float if it is finite and in `0..maximum`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidMessageError(f"{name}: expected a number, got {type(value).__name__}")
    if not 0 <= value <= maximum:  # false for NaN, too
        raise InvalidMessageError(f"{name}: {value!s:.40} is outside 0..{maximum:g}")
    return float(value)


def check_bool(name: str, value: object) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise InvalidMessageError(f"{name}: expected true or false, got {type(value).__name__}")
    return value


def check_digest(name: str, value: object) -> str:
    """Return `value` if it is a SHA-256 in lower-case hex."""
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise InvalidMessageError(f"{name}: expected 64 hex digits")
    return value
