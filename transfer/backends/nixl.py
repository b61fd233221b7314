"""NIXL: one-sided reads over UCX; its wheel is the only one from PyPI that brings RDMA verbs.

The reader reads straight from the source's memory into the target's. Beside each link there is
a TCP connection (``control.py``): it admits the pull, shows at once when the peer is gone, and
has the server look at the fence after the last byte was read.
"""

import secrets
import time
from collections import deque
from ipaddress import ip_address

import msgspec
import numpy as np

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
    Ask,
    Control,
    End,
    Finish,
    Listening,
    ask_for,
    dial,
    raise_refusal,
)
from nearkv.transfer.backends.native_transport import is_rdma
from nearkv.transfer.backends.nixl_agent import (
    NixlAgent,
    Read,
    Spans,
    active_rdma_devices,
    rdma_is_allowed,
)
from nearkv.transfer.backends.nixl_server import NixlServer, Offer
from nearkv.transfer.backends.tcp_wire import reading
from nearkv.transfer.errors import ProtocolError, PullError, Reason
from nearkv.transfer.layout import Runs, cut_runs, plan_runs
from nearkv.transfer.memory import address_of

CHUNK_BYTES = 16 << 20
WINDOW = 2
_SPINS = 64
"""Polls without a pause: small reads are over within microseconds."""
_PAUSE_SECONDS = 20e-6
_POLLS_PER_LOOK = 256
_EMULATED = "software emulation"
"""UCX's word for reads that the other side's CPU answers."""

_offers = msgspec.msgpack.Decoder(Offer)


class NixlBackend:
    """Reads by NIXL. One per process, and no ``ucx`` beside it.

    ``host`` is what servers' control connections listen on and ``advertise`` the address that
    readers get. Which networks the bytes take is UCX's choice: ``UCX_NET_DEVICES`` and
    ``UCX_TLS`` narrow it down.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        chunk_bytes: int = CHUNK_BYTES,
        max_connections: int = 64,
    ) -> None:
        self._listening = Listening(
            host=host,
            port=port,
            advertise=advertise and str(ip_address(advertise)),
            max_connections=max_connections,
        )
        self._chunk_bytes = chunk_bytes

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        return "nixl"

    def probe(self) -> Probe:
        """Load NIXL and say whether an RDMA adapter is there for it."""
        try:
            NixlAgent(f"probe-{secrets.token_hex(4)}").close()
        except PullError as error:
            return Probe(name=self.name, usable=False, detail=str(error))
        path = likely_path()
        return Probe(name=self.name, usable=True, rdma=path.rdma, detail=path.detail)

    def serve(self, source: Source) -> Server:
        """Start serving a memory; raises :class:`PullError` (``NO_PATH``)."""
        return NixlServer(source, self._listening)

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:
        """Connect to a server; raises :class:`PullError`."""
        with reading("offer"):
            decoded = _offers.decode(offer)
        if decoded.protocol != PROTOCOL:
            raise PullError(Reason.VERSION, f"protocol {decoded.protocol}, we speak {PROTOCOL}")
        if decoded.size_bytes <= 0 or not 0 < decoded.base_address < 1 << 63:
            raise ProtocolError("base_address or size_bytes is outside its range")
        return NixlLink(decoded, target, self._chunk_bytes, stop)


def likely_path() -> Path:
    """Return what reads probably go over, before there was one.

    RDMA is expected only where an adapter is active and UCX may use it.
    """
    devices = active_rdma_devices()
    rdma = bool(devices) and rdma_is_allowed()
    if rdma:
        detail = f"UCX, probably over RDMA: {', '.join(devices)}"
    else:
        why = "no active RDMA adapter" if not devices else "UCX_TLS leaves RDMA out"
        detail = f"UCX without RDMA ({why}): TCP, or CMA within a node"
    return Path(name="nixl", rdma=rdma, detail=detail)


def found_path(reads: tuple[str, str] | None) -> Path:
    """Return what reads went over, by what UCX says: (transport, how).

    Where it says nothing (somebody has set UCX_LOG_FILE, for one), RDMA is not claimed.
    """
    if reads is None:
        return Path(name="nixl", detail="unknown: UCX's log of its choices is not ours to read")
    transport, how = reads
    rdma = any(map(is_rdma, transport.split())) and how != _EMULATED
    return Path(name="nixl", rdma=rdma, detail=f"{transport}: {how}")


class NixlLink:
    """A way to one source. Useless after a pull that failed."""

    def __init__(self, offer: Offer, target: Region, chunk_bytes: int, stop: Stop) -> None:
        self._offer = offer
        self._target = target
        self._chunk_bytes = chunk_bytes
        self._path = likely_path()
        self._path_found = False
        self._agent = NixlAgent(f"nearkv-{secrets.token_hex(8)}")
        self._control: Control | None = None
        self._peer = ""
        try:
            self._control = dial(offer.host, offer.port, stop)
            self._agent.register(target.view)
            self._peer = self._agent.add_peer(offer.metadata, expected=offer.agent)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """What the bytes go over."""
        return self._path

    def pull(self, request: PullRequest, stop: Stop) -> PullReport:
        """Bring blocks; see the contract."""
        control = self._control
        if control is None:
            raise PullError(Reason.PEER_LOST, "the link is closed")
        started = time.monotonic()
        stop.check()
        runs = plan_runs(
            request.source_layout, self._target.layout, request.source_blocks, request.target_blocks
        )
        if request.source_layout.size > self._offer.size_bytes:
            raise PullError(Reason.RANGE, "the source's memory is smaller than its layout")
        try:
            self._read(runs, ask_for(request), control, stop)
        except BaseException:
            self.close()
            raise
        if not self._path_found:
            self._path = found_path(self._agent.reads_by())
            self._path_found = bool(len(runs))
        return PullReport(
            size_bytes=runs.total_bytes,
            seconds=time.monotonic() - started,
            path=self._path,
            pieces=len(runs),
        )

    def close(self) -> None:
        """Let go of the connection and the agent; no writer is left. May be called twice."""
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if self._peer:
            self._agent.drop_peer(self._peer)
            self._peer = ""
        self._agent.close()

    def _read(self, runs: Runs, ask: Ask, control: Control, stop: Stop) -> None:
        """Read, a few chunks at a time; a failure leaves reads under way to :meth:`close`."""
        control.send(ask, stop.check)
        _expect(Admitted, control, stop)
        reads: deque[Read] = deque()
        for chunk in cut_runs(runs, chunk_bytes=self._chunk_bytes):
            while len(reads) >= WINDOW:
                self._wait(reads, control, stop)
            stop.check()
            reads.append(self._start(chunk))
        while reads:
            self._wait(reads, control, stop)
        control.send(Finish(), stop.check)
        _expect(End, control, stop)

    def _start(self, chunk: Runs) -> Read:
        local = _spans(address_of(self._target.view), chunk.target, chunk.length)
        remote = _spans(self._offer.base_address, chunk.source, chunk.length)
        return self._agent.start_read(local, remote, self._peer)

    def _wait(self, reads: deque[Read], control: Control, stop: Stop) -> None:
        """Wait for the oldest read; whoever cancels, and a peer that is gone, end the wait."""
        oldest = reads[0]
        for polls in range(1 << 62):
            if oldest.poll():
                break
            if polls % _POLLS_PER_LOOK == _POLLS_PER_LOOK - 1:
                stop.check()
                _hear_refusal(control)
            if polls > _SPINS:
                time.sleep(_PAUSE_SECONDS)
        reads.popleft().release()


def _hear_refusal(control: Control) -> None:
    """Raise when the server has said why it does not go on, or is gone."""
    message = control.poll()
    if isinstance(message, End):
        raise_refusal(message)
    if message is not None:
        raise ProtocolError("the peer spoke out of turn")


def _expect(kind: type[Admitted | End], control: Control, stop: Stop) -> None:
    """Wait for the server's yes; raises its reason when it is a no."""
    answer = control.receive(stop.check)
    if isinstance(answer, End):
        raise_refusal(answer)
    if not isinstance(answer, kind):
        raise ProtocolError(f"expected to hear {kind.__name__.lower()}")


def _spans(base: int, offsets: np.ndarray, lengths: np.ndarray) -> Spans:
    spans = np.zeros((offsets.size, 3), np.uint64)
    spans[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    spans[:, 1] = lengths.astype(np.uint64)
    return spans
