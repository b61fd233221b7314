"""The TCP connection beside a native transport (``ucx``, ``nixl``): asking, refusing, and EOF.

Native libraries do not notice that a peer died (UCX without error handling waits forever), or
notice it late; a closed connection shows at once. Asking over it also gives a server the last
word on whether what was read counts, on its own clock.

::

    reader -> server    Ask: which blocks of which grant         (again for each pull)
    server -> reader    Admitted, or End with the reason why not
    reader -> server    Finish: all is here; does it count?      or Stop: never mind
    server -> reader    End: yes, or the reason why not

An End with a reason may come at any time; the connection ends with it.

Each message is a little-endian u32 length and msgpack. Nothing here is secret but the ticket,
which is good for one grant while it lasts; the bytes themselves are not encrypted either.
"""

import contextlib
import hashlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from nearkv.transfer.backends import contract
from nearkv.transfer.backends.contract import Grant, PullRequest, Source
from nearkv.transfer.backends.grants import Grants, granted_blocks
from nearkv.transfer.backends.roster import Connection, Roster, join_all
from nearkv.transfer.backends.tcp_wire import LENGTH, listen, lost, reading, tune, wait_connected
from nearkv.transfer.errors import LayoutError, ProtocolError, PullError, Reason, TransferError
from nearkv.transfer.layout import KvMemory

PROTOCOL = 1
SLICE_SECONDS = 0.05
"""The longest wait between two looks at whether to go on."""

_MAX_MESSAGE_BYTES = 64 << 10
_FAREWELL_SECONDS = 1.0

Check = Callable[[], None]


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Asks for ``count`` blocks of a grant.

    ``layers`` and ``block_bytes`` are what the reader takes the source's to be, ``digest`` is
    :func:`digest_of` the blocks and the layout it goes by, ``address`` where to send to.
    """

    protocol: int
    ticket: bytes
    first_block: int
    count: int
    layers: int
    block_bytes: int
    digest: bytes
    address: bytes = b""


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag="admitted"):
    """The grant is good: the reader may read its blocks, or is sent them."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The reader has everything and asks whether it counts."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The reader does not go on, and wants to know what was sent."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """An answer; without a ``reason`` it is a yes.

    ``rdma`` and ``detail`` as in ``Path``; ``digest`` is the xxh3-64 of all bytes sent, if
    agreed; ``sent`` is how many messages were sent over this connection.
    """

    reason: str = ""
    message: str = ""
    rdma: bool = False
    detail: str = ""
    digest: bytes = b""
    sent: int = 0


Message = Ask | Admitted | Finish | Stop | End
_encoder = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


class Limit:
    """A time limit on what a peer has to say."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raise :class:`PullError` when it is over."""
        if time.monotonic() >= self._end:
            raise PullError(Reason.DEADLINE, "the peer took too long to answer")


class Control:
    """A connection. Owns its socket; one thread at a time, but :meth:`abort` from any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)  # noqa: FBT003 (the standard library's signature)
        self._socket = sock
        self._buffer = bytearray()
        self._ended = False

    def fileno(self) -> int:
        """Return the descriptor, to wait on it beside others."""
        return self._socket.fileno()

    def send(self, message: Message, check: Check) -> None:
        """Send; raises :class:`PullError` (``PEER_LOST``) and whatever ``check`` raises."""
        body = _encoder.encode(message)
        rest = memoryview(LENGTH.pack(len(body)) + body)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except (BlockingIOError, InterruptedError):
                self._wait(select.POLLOUT)
                check()
            except OSError as error:
                raise lost(error) from error

    def poll(self) -> Message | None:
        """Return the next message if it is here.

        Raises :class:`PullError` (``PEER_LOST``) at the connection's end, and
        :class:`ProtocolError` for what is none.
        """
        message = self._next()
        if message is None:
            self._fill()
            message = self._next()
        if message is None and self._ended:
            raise PullError(Reason.PEER_LOST, "the peer closed the connection")
        return message

    def receive(self, check: Check) -> Message:
        """Wait for the next message; see :meth:`poll`."""
        while True:
            message = self.poll()
            if message is not None:
                return message
            self._wait(select.POLLIN)
            check()

    def wait(self, seconds: float) -> None:
        """Wait until something comes, at most so long."""
        select.select([self._socket], [], [], seconds)

    def end_sending(self) -> None:
        """Tell the peer that no more will be said."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """End the connection; wakes a thread that waits on it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and let go of the socket; may be called twice."""
        self.abort()
        self._socket.close()

    def _wait(self, events: int) -> None:
        poller = select.poll()
        poller.register(self._socket, events)
        poller.poll(SLICE_SECONDS * 1000)

    def _next(self) -> Message | None:
        if len(self._buffer) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._buffer)
        if size > _MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {size} bytes is over the limit")
        end = LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        with reading("message"):
            return _decoder.decode(body)

    def _fill(self) -> None:
        if self._ended:
            return
        try:
            data = self._socket.recv(_MAX_MESSAGE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise lost(error) from error
        self._ended = not data
        self._buffer += data


def dial(host: str, port: int, stop: contract.Stop) -> Control:
    """Connect to a numeric address; raises :class:`PullError`."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ProtocolError(f"host: {host!r} is no address") from error
    sock = socket.socket(family, kind, number)
    try:
        tune(sock, 0)
        sock.setblocking(False)  # noqa: FBT003 (the standard library's signature)
        sock.connect_ex(address)
        wait_connected(sock, stop.check)
    except OSError as error:
        sock.close()
        raise lost(error) from error
    except BaseException:
        sock.close()
        raise
    return Control(sock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where and how a server listens; ``advertise`` is the address that readers get."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    max_connections: int = 64
    handshake_seconds: float = 5.0
    idle_seconds: float = 60.0


class Answering(Protocol):
    """What attends to one connection's asks."""

    @property
    def sent(self) -> int:
        """How many messages were sent."""
        ...

    def answer(self, ask: Ask) -> End:
        """Serve a pull until its end; raises the reason when it does not count."""
        ...

    def close(self) -> None:
        """End the connection's own affairs; the reader has been told."""
        ...


class ControlServer:
    """Listens, and attends to each connection on a thread of its own.

    ``start`` is called there for a first ask. When all places are taken, the connection that
    has waited longest makes room. Raises :class:`PullError` (``NO_PATH``) when it cannot listen.
    """

    def __init__(self, listening: Listening, start: Callable[[Control], Answering]) -> None:
        self._listening = listening
        self._start = start
        self._closing = threading.Event()
        self._roster: Roster[Control] = Roster(
            listening.max_connections, self._closing, self._attend, thread_name="nearkv-control"
        )
        self._listener = listen(listening.host, listening.port, backlog=listening.max_connections)
        address = self._listener.getsockname()
        self.host = listening.advertise or str(address[0])
        self.port = int(address[1])
        self._accepting = threading.Thread(
            target=self._accept, name="nearkv-control-accept", daemon=True
        )
        self._accepting.start()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing.is_set()

    def check_open(self) -> None:
        """Raise :class:`PullError` (``NO_PATH``) once it is closed."""
        if self.closed:
            raise PullError(Reason.NO_PATH, "the server is closed")

    def close(self) -> None:
        """End all connections; when this returns, none is attended to any more."""
        connections = self._roster.close()
        for connection in connections:
            connection.wire.abort()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # has accept() return
        self._accepting.join()
        self._listener.close()
        join_all(connections)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Closed; or out of descriptors, or the peer left the queue: haste does not help.
                self._closing.wait(SLICE_SECONDS)
                continue
            try:
                tune(sock, 0)
                control = Control(sock)
            except OSError:
                sock.close()
                continue
            if not self._roster.admit(control):
                control.close()

    def _attend(self, connection: Connection[Control]) -> None:
        control = connection.wire
        answering: Answering | None = None
        try:
            limit = Limit(self._listening.handshake_seconds)
            while not self.closed:
                ask = _expect_ask(control, limit)
                connection.waiting_since = 0.0
                if answering is None:  # only now: nothing is set up for who asks nothing
                    answering = self._start(control)
                end = answering.answer(ask)
                control.send(end, Limit(_FAREWELL_SECONDS).check)
                connection.waiting_since = time.monotonic()
                limit = Limit(self._listening.idle_seconds)
        except TransferError as error:
            _refuse(control, error, answering)
        except Exception as error:  # noqa: BLE001 (native libraries raise what they like)
            wrapped = PullError(Reason.INTERNAL, f"{type(error).__name__}: {error}")
            _refuse(control, wrapped, answering)
        finally:
            if answering is not None:
                answering.close()
            _linger(control)
            self._roster.leave(connection)


def _expect_ask(control: Control, limit: Limit) -> Ask:
    message = control.receive(limit.check)
    if not isinstance(message, Ask):
        raise ProtocolError("an ask was expected")
    if message.protocol != PROTOCOL:
        raise PullError(Reason.VERSION, f"protocol {message.protocol}, we speak {PROTOCOL}")
    return message


def _refuse(control: Control, error: TransferError, answering: Answering | None) -> None:
    """Say why, if the peer still listens."""
    if error.reason is Reason.PEER_LOST:
        return
    sent = 0 if answering is None else answering.sent
    end = End(reason=error.reason, message=str(error)[:500], sent=sent)
    with contextlib.suppress(TransferError):
        control.send(end, Limit(_FAREWELL_SECONDS).check)


def _linger(control: Control) -> None:
    """Close, but let the peer read what was said: unread bytes here would cut it off."""
    limit = Limit(_FAREWELL_SECONDS)
    with contextlib.suppress(TransferError):
        control.end_sending()
        while True:
            control.receive(limit.check)
    control.close()


def ask_for(request: PullRequest, *, address: bytes = b"") -> Ask:
    """Return the message that asks for a request's blocks."""
    return Ask(
        protocol=PROTOCOL,
        ticket=request.ticket,
        first_block=request.first_block,
        count=len(request.source_blocks),
        layers=request.source_layout.layers,
        block_bytes=request.source_layout.block_bytes,
        digest=digest_of(request.source_layout, request.source_blocks),
        address=address,
    )


def digest_of(layout: KvMemory, blocks: tuple[int, ...]) -> bytes:
    """Digest blocks and where they lie, so that both ends know that they mean the same."""
    numbers = (
        layout.size, layout.layers, layout.blocks, layout.layer_stride,
        layout.block_stride, layout.block_bytes, layout.offset,
    )  # fmt: skip
    packed = np.asarray((*numbers, *blocks), "<i8").tobytes()
    return hashlib.blake2b(packed, digest_size=16).digest()


def admitted(grants: Grants, source: Source, ask: Ask) -> tuple[Grant, tuple[int, ...]]:
    """Return the grant and the blocks that an ask is for; raises the reason it is refused."""
    grant = grants.find(ask.ticket)
    layout = source.region.layout
    for name in ("layers", "block_bytes"):
        ours, theirs = getattr(layout, name), getattr(ask, name)
        if ours != theirs:
            raise LayoutError(f"{name}: the source has {ours}, the reader expects {theirs}")
    blocks = granted_blocks(grant, ask.first_block, ask.count)
    if min(blocks, default=0) < 0 or max(blocks, default=0) >= layout.blocks:
        raise LayoutError(f"a granted block is outside 0..{layout.blocks - 1}")
    if digest_of(layout, blocks) != ask.digest:
        raise PullError(Reason.RANGE, "the reader goes by other blocks, or another layout")
    grant.fence.check(source.slots)
    return grant, blocks


def raise_refusal(end: End) -> None:
    """Raise what an answer says, unless it is a yes."""
    if not end.reason:
        return
    try:
        reason = Reason(end.reason)
    except ValueError:
        reason = Reason.PEER_REFUSED
    raise PullError(reason, f"the source says: {end.message}")
