"""What the two ends of ``tcp`` say to each other, and how they put bytes on a socket.

::

    reader -> server    u32 length, Request in msgpack          (again for each pull)
    server -> reader    per chunk: u32 DATA, u32 length, the bytes, u64 xxh3-64 (if agreed)
                        last:      u32 END,  u32 length, End in msgpack

An END may come at any chunk boundary; only one without a reason makes the bytes count. All
integers are little-endian.
"""

import contextlib
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from nearkv.transfer.errors import ProtocolError, PullError, Reason

PROTOCOL = 1
DATA, END = 0, 1
HEADER = struct.Struct("<II")
DIGEST = struct.Struct("<Q")
LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1024
SLICE_SECONDS = 0.05
"""The longest wait between two looks at whether to go on."""

_SLICE = struct.pack("@ll", 0, int(SLICE_SECONDS * 1_000_000))
_IOV_MAX = 1024
_BATCH_BYTES = 128 << 10
"""Received by one call. A call holds the socket, which lets the sender wait when it is longer:
measured on loopback, a third is lost with 512 KiB. Sending is best left whole."""

_SILENCE_SECONDS = 15

Check = Callable[[], None]
T = TypeVar("T")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a server; opaque to everybody but ``tcp``."""

    protocol: int
    host: str
    port: int
    lanes: int
    chunk_bytes: int
    checksums: bool
    tls: bool


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for pieces ``begin`` to ``end`` of the stream of ``count`` granted blocks.

    ``layers`` and ``block_bytes`` are what the reader takes the source's to be.
    """

    protocol: int
    ticket: bytes
    first_block: int
    count: int
    begin: int
    end: int
    layers: int
    block_bytes: int


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an answer; an empty ``reason`` says that the bytes were read under the lease."""

    reason: str = ""
    message: str = ""


_encoder = msgspec.msgpack.Encoder()


def pack_message(message: msgspec.Struct) -> bytes:
    """Return a message behind its length."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def pack_end(end: End) -> bytes:
    """Return an END with its header."""
    body = _encoder.encode(end)
    return HEADER.pack(END, len(body)) + body


class Channel(Protocol):
    """A connected socket. Calls block in slices and ``check`` in between, which may raise.

    They raise :class:`PullError` (``PEER_LOST``) when the connection has ended.
    """

    def send(self, parts: Sequence[bytes | memoryview], check: Check) -> None:
        """Hand all parts to the kernel."""
        ...

    def receive(self, parts: Sequence[memoryview], check: Check) -> None:
        """Fill all parts."""
        ...

    def abort(self) -> None:
        """End the connection but keep the descriptor; any thread that waits on it wakes up."""
        ...

    def close(self) -> None:
        """End the connection and let go of it; may be called twice."""
        ...


def receive_bytes(channel: Channel, size: int, check: Check) -> bytes:
    """Return so many bytes."""
    buffer = bytearray(size)
    if size:
        channel.receive([memoryview(buffer)], check)
    return bytes(buffer)


class PlainChannel:
    """TCP as it is: scatter/gather, and waiting is done by the kernel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # noqa: FBT003 (the standard library's signature)
        # With these, blocking calls return after a slice; a timeout of Python's own would
        # cost a poll() before each of them.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
        self._socket = sock

    def send(self, parts: Sequence[bytes | memoryview], check: Check) -> None:
        """Hand all parts to the kernel, many per call."""
        for first in range(0, len(parts), _IOV_MAX):
            rest = [memoryview(part) for part in parts[first : first + _IOV_MAX]]
            while rest:
                sent = self._call(partial(self._socket.sendmsg, rest), check)
                rest = _behind(rest, sent)

    def receive(self, parts: Sequence[memoryview], check: Check) -> None:
        """Fill all parts, some per call."""
        for batch in _batches(parts):
            rest = batch
            while rest:
                receive = partial(self._socket.recvmsg_into, rest, 0, socket.MSG_WAITALL)
                count = self._call(receive, check)[0]
                if not count:
                    raise PullError(Reason.PEER_LOST, "the peer closed the connection")
                rest = _behind(rest, count)

    def _call(self, call: Callable[[], T], check: Check) -> T:
        """Make a call again until it gets somewhere."""
        while True:
            try:
                return call()
            except (BlockingIOError, InterruptedError):
                check()
            except OSError as error:
                raise lost(error) from error

    def abort(self) -> None:
        """End the connection; waiting threads wake up."""
        _shut_down(self._socket)

    def close(self) -> None:
        """End the connection."""
        _shut_down(self._socket)
        self._socket.close()


class TlsChannel:
    """TLS: no scatter/gather, and waiting is done with timeouts."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.settimeout(SLICE_SECONDS)
        self._socket = sock

    def handshake(self, check: Check) -> None:
        """Agree on keys; raises :class:`PullError` (``AUTH``) with a peer that has none."""
        self._call(self._socket.do_handshake, check)

    def send(self, parts: Sequence[bytes | memoryview], check: Check) -> None:
        """Hand all parts to the kernel, one after the other."""
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[self._call(partial(self._socket.send, rest), check) :]

    def receive(self, parts: Sequence[memoryview], check: Check) -> None:
        """Fill all parts, one after the other."""
        for part in parts:
            rest = part
            while rest:
                count = self._call(partial(self._socket.recv_into, rest), check)
                if not count:
                    raise PullError(Reason.PEER_LOST, "the peer closed the connection")
                rest = rest[count:]

    def _call(self, call: Callable[[], T], check: Check) -> T:
        while True:
            try:
                return call()
            except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                check()
            except ssl.SSLEOFError as error:
                raise lost(error) from error
            except ssl.SSLError as error:
                raise PullError(Reason.AUTH, f"TLS: {error.reason or error}") from error
            except OSError as error:
                raise lost(error) from error

    def abort(self) -> None:
        """End the connection; waiting threads wake up."""
        _shut_down(self._socket)

    def close(self) -> None:
        """End the connection, without a farewell that could block."""
        _shut_down(self._socket)
        self._socket.close()


def lost(error: OSError) -> PullError:
    """Return the error for a connection that is no more."""
    return PullError(Reason.PEER_LOST, f"the connection is lost: {error.strerror or error}")


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """Set what both ends want; a peer that is gone without a word is found in time.

    Buffers are left to the kernel unless ``buffer_bytes`` says otherwise: it grows them as the
    path needs, and a size set by hand would switch that off.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_SECONDS // 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_SECONDS * 1000)
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def wait_connected(sock: socket.socket, check: Check) -> None:
    """Wait for a connection that a non-blocking socket is making; raises :class:`PullError`."""
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    while not poller.poll(SLICE_SECONDS * 1000):
        check()
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise lost(OSError(code, os.strerror(code)))


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a listening socket; raises :class:`PullError` (``NO_PATH``) when it cannot be."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        text = f"cannot listen on {host} port {port}: {error.strerror}"
        raise PullError(Reason.NO_PATH, text) from error
    return listener


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what msgspec raises into :class:`ProtocolError`."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no {what}: {error}") from error


def _batches(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield what to receive by one call each: neither too much nor too many parts."""
    batch: list[memoryview] = []
    room = _BATCH_BYTES
    for part in parts:
        rest = part
        while len(rest) > room:
            yield [*batch, rest[:room]]
            batch, rest, room = [], rest[room:], _BATCH_BYTES
        batch.append(rest)
        room -= len(rest)
        if len(batch) == _IOV_MAX:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _behind(parts: Sequence[bytes | memoryview], count: int) -> list[memoryview]:
    """Return what is left of parts after ``count`` bytes."""
    for i, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *(memoryview(later) for later in parts[i + 1 :])]
        count -= len(part)
    return []


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Of the plain socket: TLS would first say goodbye, and wait for that.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
