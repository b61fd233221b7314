"""The source's end of ``nixl``: registers the memory, admits readers, has the last word.

Readers read one-sided, so nothing here touches the bytes. A reader says when it begins and when
it has everything; both times the fence is looked at here, on the clock that wrote it.
"""

import secrets
from collections.abc import Callable

import msgspec

from nearkv.transfer.backends.contract import Grant, Source
from nearkv.transfer.backends.control import (
    PROTOCOL,
    Ask,
    Control,
    ControlServer,
    End,
    Finish,
    Limit,
    Listening,
    admitted,
)
from nearkv.transfer.backends.grants import Grants
from nearkv.transfer.backends.nixl_agent import NixlAgent
from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.memory import address_of

_LONGEST_READ_SECONDS = 600.0


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
        # Over TCP the target of a read has to make progress, which nobody else would do here.
        self._agent = NixlAgent(f"nearkv-{secrets.token_hex(8)}", progress_thread=True)
        try:
            self._agent.register(source.region.view)
            self._metadata = self._agent.metadata()
            self._server = ControlServer(listening, self._start)
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

    def _start(self, control: Control) -> tuple[Callable[[Ask], End], Callable[[], None]]:
        def answer(ask: Ask) -> End:
            """Admit a pull, wait for its end, and say whether it counts."""
            grant, _ = admitted(self._grants, self._source, ask)
            limit = Limit(_LONGEST_READ_SECONDS)

            def check() -> None:
                limit.check()
                self._server.check_open()

            control.send(End(), check)
            if not isinstance(control.receive(check), Finish):
                raise ProtocolError("a finish was expected")
            self._grants.check_standing(grant)
            grant.fence.check(self._source.slots)
            return End()

        return answer, _nothing


def _nothing() -> None:
    """Do nothing: a connection holds nothing of its own."""
