"""Framing on Unix sockets between engine, agent and mover (pure, but for two calls).

A frame is a little-endian u32 length and that many bytes of msgpack. File descriptors travel
beside the bytes (SCM_RIGHTS), sent together with the first byte of the frame that they
belong to; the message itself says how many it takes (its ``fds`` field). Stream sockets keep
the order of bytes and descriptors, so a reader may take them off in turn.
"""

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from nearkv.transfer.errors import ProtocolError

MAX_FRAME_BYTES = 64 << 20
MAX_FDS = 8
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M")


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return a message as a frame; raises :class:`ProtocolError` when it is too large."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit")
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[M]):
    """Puts frames together from what a socket gives; ``kind`` is the union of messages.

    Descriptors that no message took belong to the reader: :meth:`close` closes them.
    """

    def __init__(self, kind: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> list[tuple[M, list[int]]]:
        """Take bytes and descriptors; return the messages now whole, each with its own.

        Raises :class:`ProtocolError` for what cannot be read; the connection must end then.
        """
        self._buffer += data
        self._fds.extend(fds)
        if len(self._fds) > MAX_FDS:
            raise ProtocolError("too many descriptors")
        messages: list[tuple[M, list[int]]] = []
        try:
            while (message := self._next()) is not None:
                messages.append((message, self._take_fds(getattr(message, "fds", 0))))
        except ProtocolError:
            for _, taken in messages:  # nobody will get them
                for fd in taken:
                    os.close(fd)
            raise
        return messages

    def _take_fds(self, count: int) -> list[int]:
        if not 0 <= count <= len(self._fds):
            raise ProtocolError(f"{count} descriptors announced, {len(self._fds)} came")
        return [self._fds.popleft() for _ in range(count)]

    def _next(self) -> M | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes is over the limit")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"no message: {error}") from error

    def close(self) -> None:
        """Close descriptors that came and were not taken."""
        while self._fds:
            os.close(self._fds.popleft())


def send_with_fds(sock: socket.socket, frame: bytes, fds: Sequence[int]) -> None:
    """Send a frame on a blocking socket, its descriptors with the first byte."""
    rights = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights.tobytes())] if fds else []
    sent = sock.sendmsg([frame], ancillary)
    if sent < len(frame):
        sock.sendall(memoryview(frame)[sent:])


def receive_with_fds(sock: socket.socket, size_bytes: int = 1 << 16) -> tuple[bytes, list[int]]:
    """Receive what is there; empty bytes mean the end. Descriptors are close-on-exec."""
    data, ancillary, flags, _ = sock.recvmsg(
        size_bytes, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise ProtocolError("descriptors were cut off")
    return data, list(fds)
