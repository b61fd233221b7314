"""Reading the protobuf wire format (pure): as much of it as the kubelet's answers need.

A message is a row of fields, each with a number and a wire type; what is not asked for is
passed over, so that later versions of a message can be read.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MORE = 0x80


class WireError(ValueError):
    """These bytes are no message."""


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field; raises :class:`WireError`."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire_type = key >> 3, key & 0x7
        if wire_type == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire_type == _BYTES:
            length, place = _varint(data, place)
        elif wire_type in (_FIXED32, _FIXED64):
            length = 4 if wire_type == _FIXED32 else 8
        else:
            raise WireError(f"wire type {wire_type} at byte {place}")
        if place + length > len(data):
            raise WireError(f"field {number} is longer than its message")
        yield number, data[place : place + length]
        place += length


def messages_of(data: bytes, number: int) -> Iterator[bytes]:
    """Yield the contents of a repeated field of messages or strings."""
    for found, content in fields_of(data):
        if found == number and isinstance(content, bytes):
            yield content


def text_of(data: bytes, number: int) -> str:
    """Return a string field, empty where it is not set."""
    last = b""
    for content in messages_of(data, number):
        last = content
    try:
        return last.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"field {number} is not UTF-8") from error


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if place >= len(data):
            raise WireError("the message ends within a number")
        byte = data[place]
        place += 1
        value |= (byte & ~_MORE) << (7 * shift)
        if not byte & _MORE:
            return value, place
    raise WireError(f"a number of more than {_MAX_VARINT_BYTES} bytes")
