"""The source's end of ``ucx``: gathers blocks of granted leases and sends them to readers."""

import msgspec
import numpy as np
from xxhash import xxh3_64

from nearkv.transfer.backends.contract import Grant, Source
from nearkv.transfer.backends.control import (
    PROTOCOL,
    Admitted,
    Ask,
    Control,
    ControlServer,
    End,
    Finish,
    Listening,
    Stop,
    admitted,
)
from nearkv.transfer.backends.grants import Grants
from nearkv.transfer.backends.stream_plan import Chunk, cut_stream
from nearkv.transfer.backends.ucx_station import Abandoned, Native, Station
from nearkv.transfer.copying import Copier
from nearkv.transfer.errors import ProtocolError, PullError, Reason
from nearkv.transfer.layout import Runs, block_offsets

_PATIENCE_SECONDS = 1.0
_HASTE_SECONDS = 0.1
_MAX_ADDRESS_BYTES = 32 << 10


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a server; opaque to everybody but ``ucx``."""

    protocol: int
    host: str
    port: int
    chunk_bytes: int
    window: int
    checksums: bool


class UcxServer:
    """Serves one memory. Raises :class:`PullError` (``NO_PATH``) when it cannot."""

    def __init__(  # noqa: PLR0913 (settings, named)
        self,
        source: Source,
        native: Native,
        listening: Listening,
        *,
        chunk_bytes: int,
        window: int,
        checksums: bool,
        abandoned: Abandoned,
    ) -> None:
        self._source = source
        self._native = native
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._checksums = checksums
        self._abandoned = abandoned
        self._grants = Grants()
        self._server = ControlServer(listening, lambda control: _Answering(self, control))

    def offer(self, grant: Grant) -> bytes:
        """Admit a reader; returns where to connect to."""
        self._server.check_open()
        self._grants.add(grant)
        return msgspec.msgpack.encode(
            Offer(
                protocol=PROTOCOL,
                host=self._server.host,
                port=self._server.port,
                chunk_bytes=self._chunk_bytes,
                window=self._window,
                checksums=self._checksums,
            )
        )

    def withdraw(self, ticket: bytes) -> None:
        """End a grant; what is being sent under it no longer counts."""
        self._grants.withdraw(ticket)

    def close(self) -> None:
        """Stop serving; when this returns, nothing reads the memory. May be called twice."""
        self._grants.clear()
        self._server.close()

    def new_station(self) -> Station:
        """Return what one connection sends with."""
        self._abandoned.check_room()
        return Station(self._native, chunk_bytes=self._chunk_bytes, window=self._window)

    def admit(self, ask: Ask) -> tuple[Grant, list[Chunk]]:
        """Return the grant of what was asked for, and the chunks to send."""
        grant, blocks = admitted(self._grants, self._source, ask)
        layout = self._source.region.layout
        offsets = block_offsets(layout, np.asarray(blocks, np.int64))
        return grant, list(cut_stream(offsets, layout.block_bytes, self._chunk_bytes))

    def check_standing(self, grant: Grant) -> None:
        """Raise when a reader may not go on."""
        self._server.check_open()
        self._grants.check_standing(grant)

    def check_lease(self, grant: Grant) -> None:
        """Raise when what is read now, or was read until now, does not count."""
        self.check_standing(grant)
        grant.fence.check(self._source.slots)

    def copier(self, station: Station) -> Copier:
        """Return what brings blocks into staging memory."""
        return Copier(self._source.region.view, station.staging)

    @property
    def checksums(self) -> bool:
        """Whether ends carry a digest of the bytes."""
        return self._checksums

    def check_open(self) -> None:
        """Raise once the server is closed."""
        self._server.check_open()

    def end(self, station: Station) -> None:
        """End a station; what it sent should arrive before, if there is still a reader."""
        patience = _HASTE_SECONDS if self._server.closed else _PATIENCE_SECONDS
        settled = station.settle_sends(patience_seconds=patience)
        station.close(self._abandoned, settled=settled)


class _Answering:
    """One connection: answers its asks, one after the other."""

    def __init__(self, server: UcxServer, control: Control) -> None:
        self._server = server
        self._control = control
        self._station = server.new_station()
        self._station.watch(control)
        self._address = b""
        self._finished = False

    @property
    def sent(self) -> int:
        """How many messages were sent to the reader."""
        return self._station.messages

    def answer(self, ask: Ask) -> End:
        """Send what was asked for; raises the reason when it does not count."""
        grant, chunks = self._server.admit(ask)
        self._connect(ask.address)
        self._finished = False
        self._control.send(Admitted(), self._server.check_open)
        copier = self._server.copier(self._station)
        try:
            digest = self._send(grant, chunks, copier)
        finally:
            copier.close()
        self._station.wait(lambda: self._finished, lambda: self._look(grant))
        rdma, detail = self._station.path()
        return End(rdma=rdma, detail=detail, digest=digest, sent=self.sent)

    def _send(self, grant: Grant, chunks: list[Chunk], copier: Copier) -> bytes:
        station, first = self._station, self._station.messages
        digest = xxh3_64()

        def look() -> None:
            self._look(grant)

        for number, chunk in enumerate(chunks, first):
            if number >= first + station.window:
                station.finish(number - station.window, look)
            self._server.check_lease(grant)
            copier.copy(_gathering(chunk, station.offset(number)))
            if self._server.checksums:
                digest.update(station.part(number, chunk.size_bytes))
            station.post_send(number, chunk.size_bytes)
        # All bytes were read by now: what is under way is a copy of them.
        self._server.check_lease(grant)
        for number in range(max(first, station.messages - station.window), station.messages):
            station.finish(number, look)
        return digest.digest() if self._server.checksums else b""

    def _look(self, grant: Grant) -> None:
        """Raise when the reader has gone, or may not go on."""
        message = self._control.poll()
        if isinstance(message, Finish):
            self._finished = True
        elif isinstance(message, Stop):
            raise PullError(Reason.CANCELLED, "the reader does not go on")
        elif message is not None:
            raise ProtocolError("a pull is under way already")
        self._server.check_standing(grant)

    def _connect(self, address: bytes) -> None:
        if address == self._address:
            return
        if self._address or not 0 < len(address) <= _MAX_ADDRESS_BYTES:
            raise PullError(Reason.RANGE, "address: not a worker's, or another one than before")
        self._station.connect(address)
        self._address = address

    def close(self) -> None:
        """End the connection's worker."""
        self._server.end(self._station)


def _gathering(chunk: Chunk, place: int) -> Runs:
    lengths = np.asarray(chunk.lengths, np.int64)
    return Runs(
        source=np.asarray(chunk.offsets, np.int64),
        target=place + np.cumsum(lengths) - lengths,
        length=lengths,
    )
