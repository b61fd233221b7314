"""The protobuf wire format (pure): fields out of bytes, and bytes out of fields.

It serves gRPC without generated code: the kubelet's pod resources and Envoy's ext_proc.
What is not asked for is passed over, so that later versions of a message can be read. Contents
of messages are views of the bytes given: nothing is copied until somebody keeps it.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MORE = 0x80
_ONE_BYTE = 0x80


class WireError(ValueError):
    """These bytes are no message."""


def fields_of(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and content of each field; raises :class:`WireError`."""
    place, end = 0, len(data)
    while place < end:
        key = data[place]
        place += 1
        if key & _MORE:
            key, place = _varint(data, place - 1)
        wire_type = key & 0x7
        if wire_type == _VARINT:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if wire_type == _BYTES:
            length, place = _varint(data, place)
        elif wire_type in (_FIXED32, _FIXED64):
            length = 4 if wire_type == _FIXED32 else 8
        else:
            raise WireError(f"wire type {wire_type} at byte {place}")
        if place + length > end:
            raise WireError(f"field {key >> 3} is longer than its message")
        yield key >> 3, data[place : place + length]
        place += length


def messages_of(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the contents of a repeated field of messages or strings."""
    for found, content in fields_of(data):
        if found == number and isinstance(content, memoryview):
            yield content


def message_at(data: memoryview, number: int) -> memoryview | None:
    """Return the last field of that number that holds bytes, as the format wants it."""
    found = None
    for place, content in fields_of(data):
        if place == number and isinstance(content, memoryview):
            found = content
    return found


def text(content: int | memoryview) -> str:
    """Return a string field; raises :class:`WireError`."""
    if isinstance(content, int):
        raise WireError("a number where text belongs")
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise WireError("a text field is not UTF-8") from error


def text_at(data: memoryview, number: int) -> str:
    """Return the last string field of that number, empty where there is none."""
    content = message_at(data, number)
    return "" if content is None else text(content)


def nested(content: int | memoryview) -> memoryview:
    """Return a field that holds a message or bytes; raises :class:`WireError`."""
    if isinstance(content, int):
        raise WireError("a number where a message belongs")
    return content


def varint_field(number: int, value: int) -> bytes:
    """Encode a number field."""
    return _encoded(number << 3 | _VARINT) + _encoded(value)


def bytes_field(number: int, content: bytes | memoryview) -> bytes:
    """Encode a field of bytes, text or a message."""
    return b"".join((_encoded(number << 3 | _BYTES), _encoded(len(content)), content))


def text_field(number: int, content: str) -> bytes:
    """Encode a field of text."""
    return bytes_field(number, content.encode())


def _encoded(value: int) -> bytes:
    if value < _ONE_BYTE:
        return bytes((value,))
    out = bytearray()
    while value >= _ONE_BYTE:
        out.append(value & ~_MORE & 0xFF | _MORE)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(data: memoryview, place: int) -> tuple[int, int]:
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
