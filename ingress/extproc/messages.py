"""Messages of Envoy's external processing protocol, as far as a picker needs them (pure).

Field numbers are those of ``envoy/service/ext_proc/v3``, checked against Envoy 1.40.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from nearkv.ingress.extproc.structs import decode_struct, encode_struct, map_entries
from nearkv.protobuf import (
    WireError,
    bytes_field,
    fields_of,
    message_at,
    nested,
    text,
    text_field,
    varint_field,
)

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

_FILTER_METADATA = 1
_HEADERS_END = 3
_BODY_ENDS = frozenset({2, 3})
"""Fields that end a body: end_of_stream, and the same without a message (gRPC bodies)."""
_OVERWRITE_OR_ADD = 2

Header = tuple[str, str]


class Part(IntEnum):
    """What a message from Envoy is about; the values are its field numbers."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7

    @property
    def answer(self) -> int:
        """The field of the answer to it."""
        return {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}[self.value]


class BodyMode(IntEnum):
    """How Envoy sends a body."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


_HEADERS = frozenset({Part.REQUEST_HEADERS, Part.RESPONSE_HEADERS})
_BODIES = frozenset({Part.REQUEST_BODY, Part.RESPONSE_BODY})
_PARTS = {part.value: part for part in Part}


@dataclass(frozen=True, slots=True)
class BodyModes:
    """How Envoy sends the two bodies of one exchange; said with its first message."""

    request: BodyMode = BodyMode.NONE
    response: BodyMode = BodyMode.NONE


@dataclass(slots=True)
class Message:
    """One message from Envoy. ``part`` is ``None`` where it is about nothing we know."""

    part: Part | None = None
    headers: list[Header] = field(default_factory=list)
    body: bytes = b""
    end_of_stream: bool = False
    metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    modes: BodyModes | None = None


def decode_message(data: bytes) -> Message:
    """Read a ``ProcessingRequest``; raises :class:`WireError`."""
    message = Message()
    for number, content in fields_of(memoryview(data)):
        part = _PARTS.get(number)
        if part is not None:
            message.part = part
            _read_part(message, part, nested(content))
        elif number == 8:  # noqa: PLR2004 (metadata_context)
            message.metadata = _structs(nested(content), _FILTER_METADATA)
        elif number == 9:  # noqa: PLR2004 (an entry of the attributes)
            message.attributes = dict(message.attributes) | _structs(
                bytes_field(1, nested(content)), 1
            )
        elif number == 11:  # noqa: PLR2004 (protocol_config)
            message.modes = _read_modes(nested(content))
    return message


def _read_part(message: Message, part: Part, data: memoryview) -> None:
    if part in _HEADERS:
        message.headers = _read_headers(message_at(data, 1))
        message.end_of_stream = any(
            number == _HEADERS_END and value for number, value in fields_of(data)
        )
    elif part in _BODIES:
        for number, content in fields_of(data):
            if number == 1:
                message.body = bytes(nested(content))
            elif number in _BODY_ENDS:
                message.end_of_stream |= bool(content)
    else:
        message.end_of_stream = True


def _read_headers(data: memoryview | None) -> list[Header]:
    headers = []
    for number, content in fields_of(data or memoryview(b"")):
        if number != 1:
            continue
        name = value = ""
        for part, found in fields_of(nested(content)):
            if part == 1:
                name = text(found)
            elif part in (2, 3):
                # Envoy puts the bytes into raw_value (3); they need not be UTF-8.
                value = value or str(nested(found), "utf-8", "surrogateescape")
        headers.append((name, value))
    return headers


def _structs(data: memoryview | bytes, number: int) -> dict[str, dict[str, Any]]:
    entries = map_entries(memoryview(data), number)
    return {name: decode_struct(content) for name, content in entries.items()}


def _read_modes(data: memoryview) -> BodyModes:
    values = {number: value for number, value in fields_of(data) if isinstance(value, int)}
    try:
        return BodyModes(BodyMode(values.get(1, 0)), BodyMode(values.get(2, 0)))
    except ValueError as error:
        raise WireError(f"a body mode that is not known: {error}") from error


# -- Answers ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutation:
    """Headers to set and to remove; removals come first."""

    set: Sequence[Header] = ()
    remove: Sequence[str] = ()

    def encode(self) -> bytes:
        """Return it as a ``HeaderMutation``."""
        return b"".join(
            (*map(_set_header, self.set), *(text_field(2, name) for name in self.remove))
        )


def _set_header(header: Header) -> bytes:
    name, value = header
    content = text_field(1, name) + bytes_field(3, value.encode("utf-8", "surrogateescape"))
    return bytes_field(1, bytes_field(1, content) + varint_field(3, _OVERWRITE_OR_ADD))


NO_MUTATION = Mutation()


def headers_answer(
    part: Part,
    mutation: Mutation = NO_MUTATION,
    *,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    reroute: bool = False,
) -> bytes:
    """Answer to headers, or to a body that is buffered whole: go on, with these changes.

    ``reroute`` has Envoy choose the route anew, by the changed headers.
    """
    common = bytes_field(2, mutation.encode()) if mutation.set or mutation.remove else b""
    if reroute:
        common += varint_field(5, 1)
    answer = bytes_field(part.answer, bytes_field(1, common))
    return answer + bytes_field(8, encode_struct(metadata)) if metadata else answer


def body_answer(part: Part, body: bytes | memoryview, *, end_of_stream: bool) -> bytes:
    """Pass a piece of a body on (``FULL_DUPLEX_STREAMED``)."""
    streamed = bytes_field(1, body) if len(body) else b""
    if end_of_stream:
        streamed += varint_field(2, 1)
    common = bytes_field(3, bytes_field(3, streamed))
    return bytes_field(part.answer, bytes_field(1, common))


def plain_answer(part: Part) -> bytes:
    """Let a part pass as it is; in full duplex that means trailers only."""
    return bytes_field(part.answer, b"")


def immediate_answer(status: int, headers: Iterable[Header], body: bytes, details: str) -> bytes:
    """End the request with an answer of our own."""
    content = bytes_field(1, varint_field(1, status))
    content += bytes_field(2, Mutation(tuple(headers)).encode())
    content += bytes_field(3, body) + text_field(5, details)
    return bytes_field(7, content)
