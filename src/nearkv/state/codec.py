"""Frames on the wire: a big-endian u32 length, then one msgpack frame.

Sans-I/O: bytes in, frames out. A peer that sends nonsense raises ``StateDecodeError``
before anything of it is kept.
"""

import struct
from collections.abc import Iterator

import msgspec

from nearkv.errors import NearkvError
from nearkv.state.model import Frame

MAX_FRAME_BYTES = 16 * 1024 * 1024
KEYS_PER_FRAME = 4096
"""Snapshots are cut into frames of this many keys, so that applying one never blocks long."""

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class StateDecodeError(NearkvError):
    """A peer's state stream could not be read."""


def encode_frame(frame: Frame) -> bytes:
    """Return the length-prefixed bytes of one frame."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames; keeps at most one incomplete frame."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames completed by ``data``; raises :class:`StateDecodeError`."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise StateDecodeError(
                        f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}"
                    )
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
                start = end
                yield _decode(body)
        finally:
            del self._buffer[:start]


def _decode(body: bytes) -> Frame:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise StateDecodeError(f"frame is not a state frame: {error}") from error
