"""Serving inside a mover: one thread, so that offers and their ends keep their order.

The backends' servers have threads of their own for the bytes.
"""

import queue
import threading
from collections.abc import Callable

import msgspec

from nearkv.agent.movers.backends import Backends
from nearkv.agent.movers.memories import SourceMemory
from nearkv.agent.movers.messages import AddSource, MakeOffer, Offered, Probed, RunProbe, Trouble
from nearkv.transfer.backends.contract import Probe, Server
from nearkv.transfer.errors import PullError, Reason, TransferError

Send = Callable[[msgspec.Struct], None]


class Servers:
    """Runs one server per source and backend, started with the first offer."""

    def __init__(self, backends: Backends, send: Send) -> None:
        self._backends = backends
        self._send = send
        self._sources: dict[str, SourceMemory] = {}
        self._servers: dict[tuple[str, str], Server] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="serve", daemon=True).start()

    def add_source(self, message: AddSource, fds: list[int]) -> None:
        """Take memory to serve."""
        memory = SourceMemory(fds[0], fds[1], message.layout, message.slots, message.form)
        self._sources[message.key] = memory

    def offer(self, message: MakeOffer) -> None:
        """Admit a reader and answer with what it needs."""
        self._calls.put(lambda: self._send(self._offered(message)))

    def withdraw(self, ticket: bytes) -> None:
        """End a grant."""
        self._calls.put(lambda: self._withdraw(ticket))

    def probe(self, message: RunProbe) -> None:
        """Answer whether a backend can be used."""
        self._calls.put(
            lambda: self._send(Probed(id=message.id, probe=self._probed(message.backend)))
        )

    def close(self) -> None:
        """Close all servers, after what was asked before."""
        closed = threading.Event()
        self._calls.put(lambda: self._close(closed))
        closed.wait()

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            except Exception as error:  # noqa: BLE001 - one bad call must not end the others
                self._send(Trouble(event="serving_failed", error=repr(error)))

    def _offered(self, message: MakeOffer) -> Offered:
        try:
            offer = self._server(message.key, message.backend).offer(message.grant)
        except TransferError as error:
            return Offered(id=message.id, reason=error.reason, message=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a transport throws, the mover answers
            self._send(Trouble(event="offer_failed", error=repr(error)))
            return Offered(id=message.id, reason=Reason.INTERNAL, message=repr(error))
        return Offered(id=message.id, offer=offer)

    def _server(self, key: str, backend: str) -> Server:
        server = self._servers.get((key, backend))
        if server is None:
            if key not in self._sources:
                raise PullError(Reason.NO_SOURCE, "the source is not known here")
            server = self._backends.get(backend).serve(self._sources[key].source())
            self._servers[key, backend] = server
        return server

    def _withdraw(self, ticket: bytes) -> None:
        for server in self._servers.values():
            server.withdraw(ticket)

    def _probed(self, backend: str) -> Probe:
        try:
            return self._backends.get(backend).probe()
        except Exception as error:  # noqa: BLE001 - a library may fail to load in any way
            return Probe(name=backend, usable=False, detail=str(error) or repr(error))

    def _close(self, closed: threading.Event) -> None:
        try:
            for server in self._servers.values():
                server.close()
        finally:
            closed.set()
