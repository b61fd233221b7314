"""``google.protobuf.Struct`` as Python values, both ways (pure).

Field numbers: Struct has fields (1), a map of key (1) to Value (2); a Value is null (1),
number (2), text (3), bool (4), Struct (5) or list (6) of values (1).
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from nearkv.protobuf import (
    WireError,
    bytes_field,
    fields_of,
    nested,
    text,
    text_field,
)

_DEEPEST = 32
"""Levels of nesting read; whoever sends more is not a gateway."""


def map_entries(data: memoryview, number: int) -> dict[str, memoryview]:
    """Return a ``map<string, message>`` field; the last of equal keys counts."""
    entries: dict[str, memoryview] = {}
    for place, content in fields_of(data):
        if place == number:
            key, value = "", memoryview(b"")
            for part, found in fields_of(nested(content)):
                if part == 1:
                    key = text(found)
                elif part == 2:  # noqa: PLR2004 (value: maps are made of 1 and 2)
                    value = nested(found)
            entries[key] = value
    return entries


def decode_struct(data: memoryview, depth: int = 0) -> dict[str, Any]:
    """Return a Struct as a dictionary; raises ``WireError``."""
    return {key: _decode_value(value, depth) for key, value in map_entries(data, 1).items()}


def encode_struct(values: Mapping[str, str | Mapping[str, Any]]) -> bytes:
    """Return a Struct of texts and further Structs."""
    return b"".join(
        bytes_field(1, text_field(1, key) + bytes_field(2, _encode_value(value)))
        for key, value in values.items()
    )


def texts_of(value: object) -> Sequence[str]:
    """Return the texts in a value that is a list of them, or one text with commas between."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list):
        return ()
    return tuple(item.strip() for item in found if isinstance(item, str) and item.strip())


def _encode_value(value: str | Mapping[str, Any]) -> bytes:
    if isinstance(value, str):
        return text_field(3, value)
    return bytes_field(5, encode_struct(value))


def _decode_value(data: memoryview, depth: int) -> Any:  # noqa: ANN401 (JSON's types)
    if depth > _DEEPEST:
        raise WireError(f"a Struct is nested more than {_DEEPEST} levels deep")
    found: Any = None
    for number, content in fields_of(data):
        match number:
            case 2:
                found = _number(nested(content))
            case 3:
                found = text(content)
            case 4:
                found = bool(content)
            case 5:
                found = decode_struct(nested(content), depth + 1)
            case 6:
                found = [
                    _decode_value(nested(item), depth + 1)
                    for place, item in fields_of(nested(content))
                    if place == 1
                ]
    return found


def _number(content: memoryview) -> float:
    try:
        value: float = struct.unpack("<d", content)[0]
    except struct.error as error:
        raise WireError("a number of a Struct is not 8 bytes") from error
    return value
