"""UCX by ucxx, the successor of ucx-py: shared memory, CMA, TCP, or RDMA where UCX has it.

Endpoints are made from worker addresses: those of ucxx's listeners carry data over TCP even
within a host. ucxx offers no one-sided reads in Python, so the server sends; beside each
transfer there is a TCP connection (``control.py``), because UCX does not say when a peer died.
"""

import contextlib
import threading
import time
from ipaddress import ip_address

import msgspec
import numpy as np
from xxhash import xxh3_64

from nearkv.transfer.backends.contract import (
    Link,
    Path,
    Probe,
    PullReport,
    PullRequest,
    Region,
    Server,
    Source,
    Stop,
)
from nearkv.transfer.backends.control import (
    PROTOCOL,
    Admitted,
    Control,
    End,
    Finish,
    Limit,
    Listening,
    Message,
    ask_for,
    dial,
    raise_refusal,
)
from nearkv.transfer.backends.control import Stop as StopSending
from nearkv.transfer.backends.native_transport import is_rdma
from nearkv.transfer.backends.stream_plan import Chunk, cut_stream
from nearkv.transfer.backends.tcp_wire import reading
from nearkv.transfer.backends.ucx_path import transports_of
from nearkv.transfer.backends.ucx_server import Offer, UcxServer
from nearkv.transfer.backends.ucx_station import (
    CHUNK_BYTES,
    WINDOW,
    Abandoned,
    Native,
    Station,
    load,
    new_context,
)
from nearkv.transfer.copying import Copier
from nearkv.transfer.errors import ProtocolError, PullError, Reason, TransferError
from nearkv.transfer.layout import Runs, block_offsets, plan_runs

_PATIENCE_SECONDS = 1.0
_MAX_STAGING_BYTES = 256 << 20
_offers = msgspec.msgpack.Decoder(Offer)


class UcxBackend:
    """Tagged messages over UCX. One per process, and no ``nixl`` beside it.

    ``host`` is what servers' control connections listen on and ``advertise`` the address that
    readers get, where it is another one. Which networks the bytes take is UCX's own choice:
    ``UCX_NET_DEVICES`` and ``UCX_TLS`` narrow it down.
    """

    def __init__(  # noqa: PLR0913 (settings, all of them optional and named)
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
        checksums: bool = True,
        max_connections: int = 64,
    ) -> None:
        self._listening = Listening(
            host=host,
            port=port,
            advertise=advertise and str(ip_address(advertise)),
            max_connections=max_connections,
        )
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._checksums = checksums
        self._abandoned = Abandoned()

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        return "ucx"

    def probe(self) -> Probe:
        """Load UCX and say which transports it has; which one is used shows with a pull."""
        try:
            native = load()
            transports = transports_of(new_context(native).info)
        except PullError as error:
            return Probe(name=self.name, usable=False, detail=str(error))
        version = ".".join(map(str, native.core.get_ucx_version()))
        rdma = any(map(is_rdma, transports))
        detail = f"UCX {version}: {', '.join(transports)}"
        return Probe(
            name=self.name,
            usable=bool(transports),
            rdma=rdma,
            detail=detail if rdma else f"{detail}; {_why_no_rdma()}",
        )

    def serve(self, source: Source) -> Server:
        """Start serving a memory; raises :class:`PullError` (``NO_PATH``)."""
        return UcxServer(
            source,
            load(),
            self._listening,
            chunk_bytes=self._chunk_bytes,
            window=self._window,
            checksums=self._checksums,
            abandoned=self._abandoned,
        )

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:
        """Connect to a server; raises :class:`PullError`."""
        with reading("offer"):
            decoded = _offers.decode(offer)
        _check_offer(decoded)
        link = UcxLink(decoded, target, load(), self._abandoned)
        link.prepare(stop)
        return link


def _why_no_rdma() -> str:
    return (
        "no RDMA: this UCX has no such transport (the one from PyPI was built without verbs), "
        "or no device is active; RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true takes the system's UCX"
    )


def _check_offer(offer: Offer) -> None:
    if offer.protocol != PROTOCOL:
        raise PullError(Reason.VERSION, f"protocol {offer.protocol}, we speak {PROTOCOL}")
    if offer.chunk_bytes <= 0 or not 0 < offer.window * offer.chunk_bytes <= _MAX_STAGING_BYTES:
        raise ProtocolError("chunk_bytes or window is outside its range")


class _Session:
    """A connection and its worker; useless after any failure."""

    def __init__(self, offer: Offer, native: Native, stop: Stop) -> None:
        self.control: Control = dial(offer.host, offer.port, stop)
        try:
            self.station = Station(native, chunk_bytes=offer.chunk_bytes, window=offer.window)
        except BaseException:
            self.control.close()
            raise
        self.station.watch(self.control)
        self.fresh = True
        self.pulling = False
        self.end: End | None = None
        """What the server said last about the pull under way."""

    def listen(self) -> Message | None:
        """Take what the server says; an end is kept."""
        message = self.control.poll()
        if isinstance(message, End):
            self.end = message
        return message

    def close(self, abandoned: Abandoned) -> None:
        """Agree with the server on what was sent, take it off, and end."""
        sent = self._ask_sent() if self.pulling else self.station.messages
        settled = self.station.settle_receives(sent, patience_seconds=_PATIENCE_SECONDS)
        self.station.close(abandoned, settled=settled)
        self.control.close()

    def _ask_sent(self) -> int | None:
        """Return how many messages the server sent, if it still says so."""
        limit = Limit(_PATIENCE_SECONDS)

        def look() -> None:
            limit.check()
            self.listen()

        with contextlib.suppress(TransferError):
            if self.end is None:
                self.control.send(StopSending(), limit.check)
            self.station.wait(lambda: self.end is not None, look)
        return None if self.end is None else self.end.sent


class UcxLink:
    """The reader's end. One pull at a time."""

    def __init__(self, offer: Offer, target: Region, native: Native, abandoned: Abandoned) -> None:
        self._offer = offer
        self._target = target
        self._native = native
        self._abandoned = abandoned
        self._session: _Session | None = None
        self._ending: list[threading.Thread] = []
        self._closed = False
        self._path = Path(name="ucx", detail="unknown before the first pull")

    @property
    def path(self) -> Path:
        """What the bytes go over, by what UCX's endpoint says."""
        return self._path

    def prepare(self, stop: Stop) -> None:
        """Connect, unless there is a connection."""
        if self._closed:
            raise PullError(Reason.NO_PATH, "the link is closed")
        if self._session is None:
            self._abandoned.check_room()
            self._session = _Session(self._offer, self._native, stop)

    def pull(self, request: PullRequest, stop: Stop) -> PullReport:
        """Receive blocks into staging memory, and copy them from there into place."""
        started = time.monotonic()
        stop.check()
        ours = self._target.layout
        planned = plan_runs(
            request.source_layout, ours, request.source_blocks, request.target_blocks
        )
        offsets = block_offsets(ours, np.asarray(request.target_blocks, np.int64))
        chunks = list(cut_stream(offsets, ours.block_bytes, self._offer.chunk_bytes))
        end = self._pull_chunks(request, chunks, stop)
        self._path = Path(name="ucx", rdma=end.rdma, detail=end.detail)
        return PullReport(
            size_bytes=planned.total_bytes,
            seconds=time.monotonic() - started,
            path=self._path,
            pieces=len(chunks),
        )

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        self._end_session()
        for thread in self._ending:
            thread.join()

    def _end_session(self) -> None:
        """Have the session end by itself: with a slow peer that takes a moment.

        No pull needs to wait for that, as UCX writes into staging memory only.
        """
        session, self._session = self._session, None
        if session is None:
            return
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        thread = threading.Thread(
            target=session.close, args=(self._abandoned,), name="nearkv-ucx-ending", daemon=True
        )
        thread.start()
        self._ending.append(thread)

    def _pull_chunks(self, request: PullRequest, chunks: list[Chunk], stop: Stop) -> End:
        """Pull; a server may have ended a connection that waited: that one is replaced."""
        while True:
            self.prepare(stop)
            assert self._session is not None  # noqa: S101 (for the type checker: just prepared)
            pulling = _Pulling(self._session, self._target, stop, checksums=self._offer.checksums)
            try:
                end = pulling.run(request, chunks)
            except BaseException as error:
                stale = not self._session.fresh and not pulling.admitted
                self._end_session()
                lost = isinstance(error, TransferError) and error.reason is Reason.PEER_LOST
                if stale and lost:
                    continue
                raise
            self._session.fresh = False
            return end


class _Pulling:
    """One pull over a session."""

    def __init__(self, session: _Session, target: Region, stop: Stop, *, checksums: bool) -> None:
        session.end = None
        session.pulling = True
        self._session = session
        self._control = session.control
        self._station = session.station
        self._target = target
        self._stop = stop
        self._checksums = checksums
        self._admitted = False

    @property
    def admitted(self) -> bool:
        """Whether the server has answered."""
        return self._admitted

    def run(self, request: PullRequest, chunks: list[Chunk]) -> End:
        """Return the server's yes; raises the reason when the bytes do not count."""
        station = self._station
        self._control.send(ask_for(request, address=station.address), self._stop.check)
        station.wait(lambda: self._admitted, self._look)
        first = station.messages
        for number, chunk in enumerate(chunks[: station.window], first):
            station.post_receive(number, chunk.size_bytes)
        copier = Copier(station.staging, self._target.view)
        try:
            digest = self._receive(chunks, first, copier)
        finally:
            copier.close()
        self._control.send(Finish(), self._stop.check)
        station.wait(lambda: self._session.end is not None, self._look)
        end = self._session.end or End()
        if self._checksums and end.digest != digest:
            raise PullError(Reason.CORRUPT, "the bytes do not have their digest")
        self._session.pulling = False
        return end

    def _receive(self, chunks: list[Chunk], first: int, copier: Copier) -> bytes:
        station, digest = self._station, xxh3_64()
        for number, chunk in enumerate(chunks, first):
            station.finish(number, self._look)
            self._stop.check()
            if self._checksums:
                digest.update(station.part(number, chunk.size_bytes))
            copier.copy(_scattering(chunk, station.offset(number)))
            following = number - first + station.window
            if following < len(chunks):
                station.post_receive(number + station.window, chunks[following].size_bytes)
        return digest.digest()

    def _look(self) -> None:
        """Raise when it is time to end, or the server says or shows that there is no more."""
        self._stop.check()
        message = self._session.listen()
        if isinstance(message, End):
            raise_refusal(message)
        elif isinstance(message, Admitted) and not self._admitted:
            self._admitted = True
        elif message is not None:
            raise ProtocolError("the server said something unexpected")


def _scattering(chunk: Chunk, place: int) -> Runs:
    lengths = np.asarray(chunk.lengths, np.int64)
    return Runs(
        source=place + np.cumsum(lengths) - lengths,
        target=np.asarray(chunk.offsets, np.int64),
        length=lengths,
    )
