"""JSON as Go's encoding/json writes and reads it, as far as an extender can tell.

Writing: compact, ``<``, ``>``, ``&`` and the line separators escaped, keys of maps sorted. Reading:
one value, what follows it is not looked at; keys match without regard to case, the last of equal
ones wins; ``null`` leaves a field as it was; integers must be integers of 64 bits.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

Json = dict[str, Any]

_INT64_MAX = 2**63 - 1
_INT64_MIN = -(2**63)
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_LINE_SEPARATORS = {chr(0x2028): "\\u2028", chr(0x2029): "\\u2029"}
_ESCAPED = str.maketrans(_ESCAPES | _LINE_SEPARATORS)


class GoJsonError(ValueError):
    """The bytes are not JSON, or not of the wanted type."""


class Pairs(tuple[tuple[str, Any], ...]):
    """An object as read: keys in order, equal ones kept."""

    __slots__ = ()


def encode(value: object) -> bytes:
    """Return the bytes that Go would send; mappings keep their order (see ``sort_keys``)."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPED).encode()


def sort_keys(mapping: Mapping[str, Any]) -> Json:
    """Return a Go map as it is written: by the bytes of its keys."""
    return dict(sorted(mapping.items(), key=lambda item: item[0].encode()))


def decode(body: bytes) -> Any:
    """Read the first JSON value; objects come as :class:`Pairs`."""
    text = body.decode("utf-8", "replace").lstrip(" \t\r\n")
    if not text:
        raise GoJsonError("EOF")
    decoder = json.JSONDecoder(object_pairs_hook=Pairs, parse_constant=_refuse_constant)
    try:
        value, _ = decoder.raw_decode(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise GoJsonError(f"invalid character in JSON: {error}") from error
    return value


def read_struct(value: Any, fields: Mapping[str, Callable[[Any], Any]], kind: str) -> Json:
    """Read an object into a struct of ``fields`` (name: how to read it); others are passed over.

    Absent and ``null`` fields are absent in what is returned.
    """
    if value is None:
        return {}
    if not isinstance(value, Pairs):
        raise GoJsonError(f"cannot unmarshal {_name(value)} into Go value of type {kind}")
    by_fold = {name.lower(): name for name in fields}
    found: Json = {}
    for key, item in value:
        name = by_fold.get(key.lower())
        if name is not None and item is not None:
            found[name] = fields[name](item)
    return found


def read_string(value: Any) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise GoJsonError(f"cannot unmarshal {_name(value)} into Go value of type string")
    return value


def read_int64(value: Any) -> int:
    """Read an integer: 7.0, "7" and what needs more than 64 bits are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GoJsonError(f"cannot unmarshal {_name(value)} into Go value of type int64")
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise GoJsonError(f"cannot unmarshal number {value} into Go value of type int64")
    return value


def list_of(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Return how to read a list."""

    def read_list(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise GoJsonError(f"cannot unmarshal {_name(value)} into Go value of type slice")
        return [read(item) for item in value]

    return read_list


def map_of(read: Callable[[Any], Any]) -> Callable[[Any], Json]:
    """Return how to read a map: its keys keep their case."""

    def read_map(value: Any) -> Json:
        if not isinstance(value, Pairs):
            raise GoJsonError(f"cannot unmarshal {_name(value)} into Go value of type map")
        return {key: read(item) for key, item in value}

    return read_map


def wrap_int64(value: int) -> int:
    """Return what is left of an integer in 64 bits: Go's arithmetic wraps around."""
    return (value + 2**63) % 2**64 - 2**63


def plain(value: Any) -> Any:
    """Return a value read by :func:`decode` with dicts in place of pairs."""
    if isinstance(value, Pairs):
        return {key: plain(item) for key, item in value}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise GoJsonError(f"invalid character in JSON: {text}")


def _name(value: Any) -> str:
    kinds: Iterable[tuple[type | tuple[type, ...], str]] = (
        (Pairs, "object"),
        (list, "array"),
        (bool, "bool"),
        ((int, float), "number"),
        (str, "string"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")
