"""The source's end of ``nixl``: registers the memory, admits readers, has the last word.

Readers read one-sided, so nothing here touches the bytes. A reader says when it begins and when
it has everything; both times the fence is looked at here, on the clock that wrote it.
"""

import secrets

import msgspec

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
from nearkv.transfer.backends.nixl_agent import NixlAgent
from nearkv.transfer.errors import ProtocolError, PullError, Reason
from nearkv.transfer.memory import address_of

_PAUSE_SECONDS = 200e-6
"""Between two rounds of progress: over TCP a longer one lets the socket run dry, and a shorter
one takes twice the time of the CPU for half the speed."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a server; opaque to everybody but ``nixl``.

    ``metadata`` is NIXL's own blob: it is taken only from an offer, which comes from an agent
    that has shown who it is.
    """

    protocol: int
    host: str
    port: int
    agent: str
    metadata: bytes
    base_address: int
    size_bytes: int


class NixlServer:
    """Serves one memory. Raises ``PullError`` (``NO_PATH``) when it cannot."""

    def __init__(self, source: Source, listening: Listening) -> None:
        self._source = source
        self._grants = Grants()
        self._agent = NixlAgent(f"nearkv-{secrets.token_hex(8)}")
        try:
            self._agent.register(source.region.view)
            self._metadata = self._agent.metadata()
            self._server = ControlServer(listening, lambda control: _Answering(self, control))
        except BaseException:
            self._agent.close()
            raise

    def offer(self, grant: Grant) -> bytes:
        """Admit a reader; returns where to connect to and what to read from."""
        self._server.check_open()
        self._grants.add(grant)
        return msgspec.msgpack.encode(
            Offer(
                protocol=PROTOCOL,
                host=self._server.host,
                port=self._server.port,
                agent=self._agent.name,
                metadata=self._metadata,
                base_address=address_of(self._source.region.view),
                size_bytes=len(self._source.region.view),
            )
        )

    def withdraw(self, ticket: bytes) -> None:
        """End a grant; what is being read under it no longer counts."""
        self._grants.withdraw(ticket)

    def close(self) -> None:
        """Stop serving and let go of the memory. May be called twice."""
        self._grants.clear()
        self._server.close()
        self._agent.close()

    def admit(self, ask: Ask) -> Grant:
        """Return the grant of what was asked for; raises the reason it is refused."""
        return admitted(self._grants, self._source, ask)[0]

    def check_standing(self, grant: Grant) -> None:
        """Raise when a reader may not go on."""
        self._server.check_open()
        self._grants.check_standing(grant)

    def check_lease(self, grant: Grant) -> None:
        """Raise when what was read until now does not count."""
        self.check_standing(grant)
        grant.fence.check(self._source.slots)

    def progress(self) -> None:
        """Do the source's part of reads over TCP; over RDMA and CMA there is none."""
        self._agent.progress()


class _Answering:
    """One connection: admits pulls, and says whether what was read counts."""

    sent = 0
    """NIXL's reads are one-sided: nothing is sent."""

    def __init__(self, server: NixlServer, control: Control) -> None:
        self._server = server
        self._control = control

    def answer(self, ask: Ask) -> End:
        """Admit a pull, wait for its end, and say whether it counts."""
        grant = self._server.admit(ask)
        self._control.send(Admitted(), lambda: self._server.check_standing(grant))
        while (message := self._control.poll()) is None:
            self._server.progress()
            self._control.wait(_PAUSE_SECONDS)
            self._server.check_standing(grant)
        if isinstance(message, Stop):
            raise PullError(Reason.CANCELLED, "the reader does not go on")
        if not isinstance(message, Finish):
            raise ProtocolError("a finish was expected")
        self._server.check_lease(grant)
        return End()

    def close(self) -> None:
        """Do nothing: a connection holds nothing of its own."""
