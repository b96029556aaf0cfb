"""How JSON becomes a dataclass: a reader for each type, worked out once, that names the field that is wrong.

Ranges are the constructors' business (see `checks`), so a reader of text or numbers hands its value on.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable
from typing import Any

from pygraphd.schema.checks import InvalidMessageError

Reader = Callable[[str, object], object]
"""Turns the JSON value of a named field into the field's type; raises InvalidMessageError."""


@functools.cache
def reader(kind: Any) -> Reader:
    """Return the reader for a field's type: a dataclass, a tuple of one type, an enum, or what JSON has itself."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind)
    if typing.get_origin(kind) is tuple:
        return _read_tuple(typing.get_args(kind)[0])
    # `bool | None` and its like are no types, and JSON has them itself.
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _read_enum(kind)
    return lambda name, value: value


def _read_dataclass(kind: Any) -> Reader:
    types = typing.get_type_hints(kind)
    fields = [(f.name, f.default, reader(types[f.name])) for f in dataclasses.fields(kind)]

    def read(name: str, value: object) -> object:
        if not isinstance(value, dict):
            raise InvalidMessageError(f"{name}: expected an object, got {type(value).__name__}")
        values = {}
        for field, default, read_field in fields:
            if field in value:
                values[field] = read_field(field, value[field])
            elif default is dataclasses.MISSING:
                raise InvalidMessageError(f"{name}: {field} is missing")
        return kind(**values)

    return read


def _read_tuple(item: Any) -> Reader:
    read_item = reader(item)

    def read(name: str, value: object) -> object:
        if not isinstance(value, list):
            raise InvalidMessageError(f"{name}: expected a list, got {type(value).__name__}")
        return tuple(read_item(name, element) for element in value)

    return read


def _read_enum(kind: type[enum.Enum]) -> Reader:
    members = {member.value: member for member in kind}

    def read(name: str, value: object) -> object:
        if not isinstance(value, str) or value not in members:
            raise InvalidMessageError(f"{name}: expected one of {', '.join(members)}, got {value!r:.40}")
        return members[value]

    return read
