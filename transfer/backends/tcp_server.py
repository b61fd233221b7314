"""The source's end of ``tcp``: sends blocks of granted leases to readers.

A thread accepts, and one per connection answers; they are bounded, as is how long a connection
may take to say what it wants. When all places are taken, the connection that has waited longest
without a pull makes room.
"""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from xxhash import xxh3_64

from nearkv.transfer.backends.chunk_access import chunk_reads
from nearkv.transfer.backends.contract import Grant, Source
from nearkv.transfer.backends.grants import Grants, granted_blocks
from nearkv.transfer.backends.roster import Connection, Roster, join_all
from nearkv.transfer.backends.stream_plan import Chunk, cut_stream
from nearkv.transfer.backends.tcp_wire import (
    DATA,
    DIGEST,
    HEADER,
    LENGTH,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Channel,
    Check,
    End,
    Offer,
    PlainChannel,
    Request,
    TlsChannel,
    listen,
    pack_end,
    reading,
    receive_bytes,
    tune,
)
from nearkv.transfer.copying import order_reads
from nearkv.transfer.errors import LayoutError, ProtocolError, PullError, Reason, TransferError
from nearkv.transfer.layout import block_offsets

_BACKLOG = 128
_LAST_WORDS_SECONDS = 1.0
"""How long a reader may take to hear why an answer ends."""

_requests = msgspec.msgpack.Decoder(Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a server serves. ``idle_seconds`` is how long a connection may wait between pulls."""

    host: str
    port: int
    advertise: str
    lanes: int
    chunk_bytes: int
    checksums: bool
    buffer_bytes: int
    tls: ssl.SSLContext | None
    max_connections: int
    handshake_seconds: float
    idle_seconds: float


class TcpServer:
    """Serves one memory. Raises :class:`PullError` (``NO_PATH``) when it cannot listen."""

    def __init__(self, source: Source, serving: Serving) -> None:
        self._source = source
        self._serving = serving
        self._grants = Grants()
        self._closing = threading.Event()
        self._roster: Roster[PlainChannel | TlsChannel] = Roster(
            serving.max_connections, self._closing, self._attend, thread_name="nearkv-tcp-send"
        )
        self._listener = listen(serving.host, serving.port, backlog=_BACKLOG)
        address = self._listener.getsockname()
        self.host = serving.advertise or str(address[0])
        self.port = int(address[1])
        self._accepting = threading.Thread(target=self._accept, name="nearkv-tcp-accept")
        self._accepting.daemon = True
        self._accepting.start()

    def offer(self, grant: Grant) -> bytes:
        """Admit a reader; returns where to connect to."""
        if self._closing.is_set():
            raise PullError(Reason.NO_PATH, "the server is closed")
        self._grants.add(grant)
        return msgspec.msgpack.encode(
            Offer(
                protocol=PROTOCOL,
                host=self.host,
                port=self.port,
                lanes=self._serving.lanes,
                chunk_bytes=self._serving.chunk_bytes,
                checksums=self._serving.checksums,
                tls=self._serving.tls is not None,
            )
        )

    def withdraw(self, ticket: bytes) -> None:
        """End a grant; what is being sent under it no longer counts."""
        self._grants.withdraw(ticket)

    def close(self) -> None:
        """Stop serving; when this returns, no thread reads the memory. May be called twice."""
        connections = self._roster.close()
        _wake(self._listener)
        self._grants.clear()
        for connection in connections:
            connection.wire.abort()
        self._accepting.join()
        self._listener.close()
        join_all(connections)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                # Out of descriptors, or the peer left the queue: neither is helped by haste.
                time.sleep(0.01)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Give a new connection a thread, if there is a place for it."""
        try:
            tune(sock, self._serving.buffer_bytes)
            channel = self._channel(sock)
        except (OSError, ssl.SSLError):
            sock.close()
            return
        if not self._roster.admit(channel):
            if not self._closing.is_set() and isinstance(channel, PlainChannel):
                _refuse(channel, PullError(Reason.BUSY, "all connections are in use"))
            channel.close()

    def _channel(self, sock: socket.socket) -> PlainChannel | TlsChannel:
        if self._serving.tls is None:
            return PlainChannel(sock)
        return TlsChannel(
            self._serving.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        )

    def _attend(self, connection: Connection[PlainChannel | TlsChannel]) -> None:
        """Answer a connection's requests until it ends, or says something wrong."""
        channel = connection.wire
        try:
            limit = _Limit(self._serving.handshake_seconds)
            if isinstance(channel, TlsChannel):
                channel.handshake(limit.check)
            while not self._closing.is_set():
                request = _receive_request(channel, limit)
                connection.waiting_since = 0.0
                self._answer(channel, request)
                connection.waiting_since = time.monotonic()
                limit = _Limit(self._serving.idle_seconds)
        except TransferError as error:
            _refuse(channel, error)
        finally:
            channel.close()
            self._roster.leave(connection)

    def _answer(self, channel: Channel, request: Request) -> None:
        """Send what was asked for, and whether it counts; raises the reason when not."""
        grant = self._grants.find(request.ticket)
        chunks = self._chunks(grant, request)
        slots = self._source.slots

        def check() -> None:
            self._grants.check_standing(grant)
            grant.fence.check(slots)

        digest = b""
        try:
            with chunk_reads(self._source.region, chunks, self._serving.chunk_bytes) as staged:
                for chunk, parts in staged:
                    check()
                    head, digest = digest + HEADER.pack(DATA, chunk.size_bytes), b""
                    begun = _Begun(check)
                    channel.send([head, *parts], begun.check)
                    # After sending: the reader is at work on it, and it is in the cache.
                    digest = _digest(parts) if self._serving.checksums else b""
                    begun.end()
            # All bytes were read by now: the kernel has a copy of them.
            order_reads()
            check()
        except TransferError:
            # A chunk that was sent is completed, so that the reason can follow.
            channel.send([digest], _Limit(_LAST_WORDS_SECONDS).check)
            raise
        channel.send([digest + pack_end(End())], check)

    def _chunks(self, grant: Grant, request: Request) -> Iterator[Chunk]:
        """Return what to send; raises when the request asks for anything else than granted."""
        layout = self._source.region.layout
        for name in ("layers", "block_bytes"):
            ours, theirs = getattr(layout, name), getattr(request, name)
            if ours != theirs:
                raise LayoutError(f"{name}: the source has {ours}, the reader expects {theirs}")
        blocks = granted_blocks(grant, request.first_block, request.count)
        if min(blocks, default=0) < 0 or max(blocks, default=0) >= layout.blocks:
            raise LayoutError(f"a granted block is outside 0..{layout.blocks - 1}")
        pieces = layout.layers * len(blocks)
        if not 0 <= request.begin <= request.end <= pieces:
            raise PullError(
                Reason.RANGE, f"pieces {request.begin} to {request.end} of {pieces} asked for"
            )
        offsets = block_offsets(layout, np.asarray(blocks, np.int64))
        share = offsets[request.begin : request.end]
        return cut_stream(share, layout.block_bytes, self._serving.chunk_bytes)


class _Limit:
    """A time limit on what a connection has to say."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raise :class:`PullError` when it is over."""
        if time.monotonic() >= self._end:
            raise PullError(Reason.DEADLINE, "the request took too long to come")

    def check_silently(self) -> None:
        """Raise what is not told the peer: its next request must not find an answer to none."""
        if time.monotonic() >= self._end:
            raise PullError(Reason.PEER_LOST, "nothing was asked for")


class _Begun:
    """A chunk that is being sent: it is completed even when ``check`` says no meanwhile.

    In the middle of it the reader would take the reason for data, and lose its place. A reader
    that takes nothing gets a moment for the rest, no more.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._error: TransferError | None = None
        self._limit: _Limit | None = None

    def check(self) -> None:
        """Note the first error; raise when the moment for the rest is over."""
        if self._limit is not None:
            self._limit.check_silently()
            return
        try:
            self._check()
        except TransferError as error:
            self._error, self._limit = error, _Limit(_LAST_WORDS_SECONDS)

    def end(self) -> None:
        """Raise what was noted, now that all of the chunk was sent."""
        if self._error is not None:
            raise self._error


def _receive_request(channel: Channel, limit: _Limit) -> Request:
    (size,) = LENGTH.unpack(receive_bytes(channel, LENGTH.size, limit.check_silently))
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a request of {size} bytes is over the limit")
    with reading("request"):
        request = _requests.decode(receive_bytes(channel, size, limit.check))
    if request.protocol != PROTOCOL:
        raise PullError(Reason.VERSION, f"protocol {request.protocol}, we speak {PROTOCOL}")
    return request


def _refuse(channel: Channel, error: TransferError) -> None:
    """Say why, if the peer still listens; it gets a moment for it, no more."""
    if error.reason is Reason.PEER_LOST:
        return
    try:
        end = End(reason=error.reason, message=str(error)[:500])
        channel.send([pack_end(end)], _Limit(_LAST_WORDS_SECONDS).check)
    except TransferError:
        return


def _digest(parts: list[memoryview]) -> bytes:
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return DIGEST.pack(digest.intdigest())


def _wake(listener: socket.socket) -> None:
    """Have accept() return."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
