"""Other node, any network: plain sockets, a few lanes, scatter/gather straight into place.

The bytes of a pull are divided among lanes, each a connection. A server sends without being
asked again, so that as many chunks are in flight as the connection's buffers hold.
"""

import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from ipaddress import ip_address

import msgspec
import numpy as np
from xxhash import xxh3_64

from nearkv.transfer.backends.chunk_access import chunk_writes
from nearkv.transfer.backends.contract import (
    Link,
    Path,
    Probe,
    PullReport,
    PullRequest,
    Region,
    Source,
    Stop,
)
from nearkv.transfer.backends.stream_plan import Share, cut_stream, shares
from nearkv.transfer.backends.tcp_server import Serving, TcpServer
from nearkv.transfer.backends.tcp_wire import (
    DATA,
    DIGEST,
    END,
    HEADER,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Channel,
    Check,
    End,
    Offer,
    PlainChannel,
    Request,
    TlsChannel,
    lost,
    pack_message,
    reading,
    receive_bytes,
    tune,
    wait_connected,
)
from nearkv.transfer.errors import ProtocolError, PullError, Reason, TransferError
from nearkv.transfer.layout import Offsets, block_offsets, plan_runs

CHUNK_BYTES = 1 << 20
"""Small enough to be in a processor's cache between the checksum and the socket."""

LANE_BYTES = 4 << 20
"""Less than this is not worth another lane."""

_MAX_LANES = 8
_offers = msgspec.msgpack.Decoder(Offer)
_ends = msgspec.msgpack.Decoder(End)


class TcpBackend:
    """Plain sockets, or TLS where both ends have an ``ssl.SSLContext``.

    ``host`` is what a server listens on and ``advertise`` the address that readers get, where
    that is another one. Offers carry numeric addresses only: a name could take longer to
    resolve than a pull may. ``lanes=0`` is one for each four processors, four at most: a lane
    keeps one busy at either end, and lanes that have to share one are slower than one lane.
    """

    def __init__(  # noqa: PLR0913 (settings, all of them optional and named)
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        lanes: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        checksums: bool = True,
        buffer_bytes: int = 0,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        tls_name: str = "",
        max_connections: int = 64,
        handshake_seconds: float = 5.0,
        idle_seconds: float = 60.0,
    ) -> None:
        if not 0 <= lanes <= _MAX_LANES:
            raise ValueError(f"lanes: {lanes} is outside 0..{_MAX_LANES}")
        self._serving = Serving(
            host=host,
            port=port,
            advertise=advertise and str(ip_address(advertise)),
            lanes=lanes or _default_lanes(),
            chunk_bytes=chunk_bytes,
            checksums=checksums,
            buffer_bytes=buffer_bytes,
            tls=server_tls,
            max_connections=max_connections,
            handshake_seconds=handshake_seconds,
            idle_seconds=idle_seconds,
        )
        self._client_tls = client_tls
        self._tls_name = tls_name

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        return "tcp"

    def probe(self) -> Probe:
        """Say that sockets work; whether a peer is reachable shows when connecting."""
        tls = "TLS" if self._client_tls or self._serving.tls else "no TLS"
        return Probe(name=self.name, usable=True, detail=f"sockets, {tls}")

    def serve(self, source: Source) -> TcpServer:
        """Start serving a memory; raises :class:`PullError` (``NO_PATH``)."""
        return TcpServer(source, self._serving)

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:
        """Connect a first lane; raises :class:`PullError`."""
        with reading("offer"):
            decoded = _offers.decode(offer)
        _check_offer(decoded)
        if decoded.tls and self._client_tls is None:
            raise PullError(Reason.AUTH, "the server wants TLS, which is not set up here")
        if self._client_tls is not None and not decoded.tls:
            raise PullError(Reason.AUTH, "TLS is set up here, but the server has none")
        link = TcpLink(decoded, target, self._dial)
        link.prepare(stop)
        return link

    def _dial(self, offer: Offer, stop: Stop) -> "PlainChannel | TlsChannel":
        """Make a connection; raises :class:`PullError`."""
        sock = _connected(offer, self._serving.buffer_bytes, stop)
        try:
            if self._client_tls is None:
                return PlainChannel(sock)
            sock.settimeout(0)
            name = self._tls_name or offer.host
            channel = TlsChannel(
                self._client_tls.wrap_socket(
                    sock, server_hostname=name, do_handshake_on_connect=False
                )
            )
        except OSError as error:
            sock.close()
            raise lost(error) from error
        try:
            channel.handshake(stop.check)
        except BaseException:
            channel.close()
            raise
        return channel


def _default_lanes() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def _check_offer(offer: Offer) -> None:
    if offer.protocol != PROTOCOL:
        raise PullError(Reason.VERSION, f"protocol {offer.protocol}, we speak {PROTOCOL}")
    if not 1 <= offer.lanes <= _MAX_LANES:
        raise ProtocolError(f"lanes: {offer.lanes} is outside 1..{_MAX_LANES}")
    if not 0 < offer.port < 1 << 16 or offer.chunk_bytes <= 0:
        raise ProtocolError("port or chunk_bytes is outside its range")


def _connected(offer: Offer, buffer_bytes: int, stop: Stop) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            offer.host, offer.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except OSError as error:
        raise ProtocolError(f"host: {offer.host!r} is no address") from error
    sock = socket.socket(family, kind, number)
    try:
        tune(sock, buffer_bytes)
        sock.setblocking(False)  # noqa: FBT003 (the standard library's signature)
        sock.connect_ex(address)
        wait_connected(sock, stop.check)
    except OSError as error:
        sock.close()
        raise lost(error) from error
    except BaseException:
        sock.close()
        raise
    return sock


class _Failure:
    """The first error of a pull's lanes; the others then end, too."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.error: TransferError | None = None

    def check(self) -> None:
        """Raise when the pull must end, or when another lane has failed."""
        self._stop.check()
        if self.error is not None:
            raise PullError(Reason.CANCELLED, "another lane failed")

    def note(self, error: TransferError) -> None:
        """Keep the first."""
        if self.error is None:
            self.error = error


class TcpLink:
    """The reader's end. One pull at a time; lanes that ended well are used again."""

    def __init__(
        self,
        offer: Offer,
        target: Region,
        dial: Callable[[Offer, Stop], PlainChannel | TlsChannel],
    ) -> None:
        self._offer = offer
        self._target = target
        self._dial = dial
        self._idle: deque[Channel] = deque()
        self._closed = False
        where = (
            f"[{offer.host}]:{offer.port}" if ":" in offer.host else f"{offer.host}:{offer.port}"
        )
        self._path = Path(name="tcp", detail=f"{where}{', TLS' if offer.tls else ''}")

    @property
    def path(self) -> Path:
        """What the bytes go over."""
        return self._path

    def prepare(self, stop: Stop) -> None:
        """Connect one lane."""
        self._idle.append(self._dial(self._offer, stop))

    def pull(self, request: PullRequest, stop: Stop) -> PullReport:
        """Receive blocks into place; no thread writes there when this returns."""
        started = time.monotonic()
        stop.check()
        if self._closed:
            raise PullError(Reason.NO_PATH, "the link is closed")
        ours = self._target.layout
        planned = plan_runs(
            request.source_layout, ours, request.source_blocks, request.target_blocks
        )
        offsets = block_offsets(ours, np.asarray(request.target_blocks, np.int64))
        lanes = min(self._offer.lanes, 1 + planned.total_bytes // LANE_BYTES)
        parts = shares(offsets.size, lanes) or [Share(0, 0)]
        failure = _Failure(stop)
        counts = [0] * len(parts)

        def run(i: int) -> None:
            try:
                counts[i] = self._pull_share(request, parts[i], offsets, stop, failure.check)
            except TransferError as error:
                failure.note(error)
            except Exception as error:  # noqa: BLE001 (a lane that broke must not count)
                failure.note(PullError(Reason.INTERNAL, f"{type(error).__name__}: {error}"))

        _run_all(run, len(parts))
        if failure.error is not None:
            raise failure.error
        return PullReport(
            size_bytes=planned.total_bytes,
            seconds=time.monotonic() - started,
            path=self._path,
            pieces=sum(counts),
        )

    def close(self) -> None:
        """End all lanes."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _pull_share(
        self, request: PullRequest, share: Share, offsets: Offsets, stop: Stop, check: Check
    ) -> int:
        """Pull a lane's share; returns in how many parts it came to lie."""
        asked = pack_message(
            Request(
                protocol=PROTOCOL,
                ticket=request.ticket,
                first_block=request.first_block,
                count=len(request.target_blocks),
                begin=share.begin,
                end=share.end,
                layers=request.source_layout.layers,
                block_bytes=request.source_layout.block_bytes,
            )
        )
        channel, header = self._ask(asked, stop, check)
        try:
            count = self._receive(channel, header, offsets[share.begin : share.end], check)
        except BaseException:
            channel.close()
            raise
        self._idle.append(channel)
        return count

    def _ask(self, asked: bytes, stop: Stop, check: Check) -> tuple[Channel, bytes]:
        """Send a request; returns the lane and the answer's first header.

        A server may have closed a lane that waited: that one is replaced.
        """
        while True:
            try:
                channel, fresh = self._idle.popleft(), False
            except IndexError:
                channel, fresh = self._dial(self._offer, stop), True
            try:
                channel.send([asked], check)
                return channel, receive_bytes(channel, HEADER.size, check)
            except BaseException as error:
                channel.close()
                was_lost = isinstance(error, PullError) and error.reason is Reason.PEER_LOST
                if fresh or not was_lost:
                    raise

    def _receive(self, channel: Channel, header: bytes, offsets: Offsets, check: Check) -> int:
        """Receive chunks until the END that makes them count, or says why they do not."""
        offer, count, corrupt = self._offer, 0, ""
        behind = bytearray((DIGEST.size if offer.checksums else 0) + HEADER.size)
        block_bytes = self._target.layout.block_bytes
        chunks = cut_stream(offsets, block_bytes, offer.chunk_bytes)
        at_most = max(1, min(offer.chunk_bytes, offsets.size * block_bytes))
        with chunk_writes(self._target, chunks, at_most) as staged:
            for number, (chunk, parts) in enumerate(staged):
                check()
                _expect_data(channel, header, chunk.size_bytes, check)
                # The next header comes in the same call, which would cost as much as all else.
                channel.receive([*parts, memoryview(behind)], check)
                header = bytes(behind[-HEADER.size :])
                if offer.checksums and behind[: DIGEST.size] != _digest(parts):
                    # If the lease ended, bytes may have changed while they were sent: the END
                    # tells. It comes soon then, as the server looks at the lease for each chunk.
                    corrupt = corrupt or f"chunk {number} does not have its digest"
                count += len(parts)
        _expect_end(channel, header, check)
        if corrupt:
            raise PullError(Reason.CORRUPT, corrupt)
        return count


def _run_all(run: Callable[[int], None], count: int) -> None:
    """Run lanes side by side, and return when all have ended."""
    threads = [
        threading.Thread(target=run, args=(i,), name="nearkv-tcp-receive") for i in range(1, count)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        run(0)
    finally:
        for thread in started:
            thread.join()


def _expect_data(channel: Channel, header: bytes, size: int, check: Check) -> None:
    kind, length = HEADER.unpack(header)
    if kind == END:
        end = _read_end(channel, length, check)
        if not end.reason:
            raise ProtocolError("the answer ended early, without a reason")
        raise _refusal(end)
    if kind != DATA or length != size:
        raise ProtocolError(f"a chunk of kind {kind} and {length} bytes, expected {size}")


def _expect_end(channel: Channel, header: bytes, check: Check) -> None:
    kind, length = HEADER.unpack(header)
    if kind != END:
        raise ProtocolError(f"kind {kind} where the answer should end")
    end = _read_end(channel, length, check)
    if end.reason:
        raise _refusal(end)


def _read_end(channel: Channel, length: int, check: Check) -> End:
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"an end of {length} bytes is over the limit")
    with reading("end"):
        return _ends.decode(receive_bytes(channel, length, check))


def _refusal(end: End) -> PullError:
    try:
        reason = Reason(end.reason)
    except ValueError:
        reason = Reason.PEER_REFUSED
    return PullError(reason, f"the source says: {end.message}")


def _digest(parts: list[memoryview]) -> bytes:
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return DIGEST.pack(digest.intdigest())
