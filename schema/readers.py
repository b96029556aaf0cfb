"""Readers that make dataclasses of JSON values: one for each type, made once. An error names the field that is wrong.

Constructors check ranges (see `checks`), so a reader of text or of a number returns the value as it is.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

from pygraphd.schema.checks import InvalidMessageError

Reader = Callable[[str, object], object]
"""Turns the JSON value of a named field into the field's type; raises InvalidMessageError."""


@functools.cache
def reader(kind: Any) -> Reader:
    """Return the reader for a field's type: a dataclass, a tuple of one type, an enum, one of these or None, or a value of JSON's own."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind)
    if typing.get_origin(kind) is tuple:
        return _read_tuple(typing.get_args(kind)[0])
    if isinstance(kind, types.UnionType):
        # All unions in messages are "X | None", in this order.
        return _read_optional(typing.get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _read_enum(kind)
    return lambda name, value: value


def _read_dataclass(kind: Any) -> Reader:
    types = typing.get_type_hints(kind)
    # Only known fields are looked for: a peer of a newer version may send others.
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


def _read_optional(kind: Any) -> Reader:
    read_value = reader(kind)
    return lambda name, value: None if value is None else read_value(name, value)


def _read_tuple(item: Any) -> Reader:
    read_item = reader(item)

    def read(name: str, value: object) -> object:
        if not isinstance(value, list):
            raise InvalidMessageError(f"{name}: expected a list, got {type(value).__name__}")
        return tuple(read_item(name, element) for element in value)

    return read


def _read_enum(kind: type[enum.Enum]) -> Reader:
    def read(name: str, value: object) -> object:
        try:
            return kind(value)
        except ValueError as error:
            known = ", ".join(str(member.value) for member in kind)
            raise InvalidMessageError(f"{name}: expected one of {known}, got {value!r:.40}") from error

    return read
