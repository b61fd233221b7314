"""The conversations with engines: who they are, and what their messages set off.

A connection begins with a registration, which decides whether it is a worker's or a
scheduler's. Whatever an engine does wrong ends its own connection, and nothing else.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from nearkv.agent.transfer.connection import Connection, close_fds, peer_uid
from nearkv.agent.transfer.departing import Departures
from nearkv.agent.transfer.lookups import LookupDesk
from nearkv.agent.transfer.memory_forms import check_memory
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.pulling import PullDesk
from nearkv.agent.transfer.registry import Registration, Registry
from nearkv.agent.transfer.sourcing import SourceDesk
from nearkv.transfer.errors import ProtocolError, Reason, TransferError
from nearkv.transfer.lease import SLOT_BYTES
from nearkv.transfer.memory import check_sealed
from nearkv.transfer.messages import (
    CancelPull,
    FromEngine,
    LeaseClosed,
    Lookup,
    LookupDone,
    OpenLease,
    Refused,
    Registered,
    RegisterScheduler,
    RegisterWorker,
    StartPull,
)

NOT_ALLOWED, TOO_MANY, NO_HANDSHAKE = "not_allowed", "too_many", "no_handshake"
REFUSED, REPLACED = "refused", "replaced"
_MAX_LOOKUPS = 1024

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """Who may connect, how many, and how long a registration may take."""

    allowed_uids: frozenset[int]
    max_connections: int = 256
    handshake_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Desks:
    """Those who do what engines ask for."""

    registry: Registry
    source: SourceDesk
    lookups: LookupDesk
    pulls: PullDesk
    departures: Departures
    metrics: TransferMetrics


class EngineSessions:
    """All connections of engines.

    ``greeting`` is what registered engines are told; ``on_complete`` is called when an
    engine can move KV, ``on_found`` with the node that a lookup found something on.
    """

    def __init__(
        self,
        desks: Desks,
        rules: SessionRules,
        greeting: Registered,
        *,
        mode_of: Callable[[str], str],
        on_complete: Callable[[Registration], None],
        on_found: Callable[[str], None],
    ) -> None:
        self.desks = desks
        self.greeting = greeting
        self.on_found = on_found
        self._rules = rules
        self._mode_of = mode_of
        self._on_complete = on_complete
        self._sessions: set[EngineSession] = set()

    def __len__(self) -> int:
        """Return how many connections there are."""
        return len(self._sessions)

    def accept(self, sock: socket.socket) -> None:
        """Take a new connection, unless its other end must not be here."""
        uid = peer_uid(sock)
        if uid not in self._rules.allowed_uids:
            log.warning("engine_not_allowed", uid=uid)
            self._turn_away(sock, NOT_ALLOWED)
        elif len(self._sessions) >= self._rules.max_connections:
            self._turn_away(sock, TOO_MANY)
        else:
            self._sessions.add(EngineSession(sock, self, self._rules.handshake_seconds))

    def close(self) -> None:
        """End all connections; what was registered on them departs."""
        for session in list(self._sessions):
            session.end("closed")

    def register(
        self, session: "EngineSession", message: RegisterWorker | RegisterScheduler, fds: list[int]
    ) -> Registration:
        """Register what came on a connection; raises :class:`TransferError`, owning no ``fds``."""
        if isinstance(message, RegisterWorker):
            check_memory(message, fds)
        elif len(fds) != 1:
            raise TransferError(Reason.MALFORMED, "fds: a registration brings one descriptor")
        mode = self._mode_of(message.engine)
        if mode != "agent":
            raise TransferError(
                Reason.PEER_REFUSED, f"engine: the agent's settings say transfer: {mode}"
            )
        (fd,) = fds
        registry = self.desks.registry
        if isinstance(message, RegisterWorker):
            departures = registry.add_worker(message, fd, session)
        else:
            check_sealed(fd, message.slots * SLOT_BYTES)
            departures = registry.add_scheduler(message, fd, session)
        for departure in departures:
            self.desks.departures.begin(departure)
        registration = registry.engines[message.engine]
        if registration.is_complete:
            self._on_complete(registration)
        return registration

    def ended(self, session: "EngineSession", cause: str) -> None:
        """Take note that a connection is over."""
        self._sessions.discard(session)
        self.desks.metrics.connection_ended(cause)
        departure = self.desks.registry.remove(session)
        if departure is not None:
            log.info("engine_left", engine=departure.registration.engine, cause=cause)
            self.desks.departures.begin(departure)

    def _turn_away(self, sock: socket.socket, cause: str) -> None:
        self.desks.metrics.connection_ended(cause)
        sock.close()


class EngineSession:
    """One connection, from its first byte to its end."""

    def __init__(
        self, sock: socket.socket, sessions: EngineSessions, handshake_seconds: float
    ) -> None:
        self._sessions = sessions
        self._desks = sessions.desks
        self._registration: Registration | None = None
        self._rank: int | None = None
        self._lookups: set[asyncio.Task[None]] = set()
        self._connection = Connection(sock, on_message=self._take, on_end=self._on_end)
        loop = asyncio.get_running_loop()
        self._handshake = loop.call_later(handshake_seconds, self.end, NO_HANDSHAKE)

    def send(self, message: msgspec.Struct) -> None:
        """Send the engine a message; one that cannot be sent is lost."""
        self._connection.send(message)

    def replaced(self) -> None:
        """End: something newer has taken the place."""
        self.end(REPLACED)

    def end(self, cause: str) -> None:
        """End the connection."""
        if self._connection.is_open:
            self._connection.close()
            self._on_end(cause)

    def _on_end(self, cause: str) -> None:
        self._handshake.cancel()
        for task in self._lookups:
            task.cancel()
        self._sessions.ended(self, cause)

    def _take(self, message: FromEngine, fds: list[int]) -> None:
        if self._registration is None:
            self._register(message, fds)
            return
        if fds:
            close_fds(fds)
        if self._rank is None:
            self._take_from_scheduler(self._registration, message)
        else:
            self._take_from_worker(self._registration, self._rank, message)

    def _register(self, message: FromEngine, fds: list[int]) -> None:
        if not isinstance(message, RegisterWorker | RegisterScheduler):
            close_fds(fds)
            raise ProtocolError("the first message must be a registration")
        try:
            registration = self._sessions.register(self, message, fds)
        except TransferError as error:
            close_fds(fds)
            self._refuse(message.engine, error)
            return
        self._handshake.cancel()
        self._registration = registration
        self._desks.metrics.registration_ended()
        self.send(self._sessions.greeting)
        log.info("engine_registered", engine=message.engine, complete=registration.is_complete)
        if isinstance(message, RegisterWorker):
            self._rank = message.compatibility.parallelism.tp_rank
        else:
            for lease in message.leases:
                self._desks.source.lease_opened(registration, lease)

    def _refuse(self, engine: str, error: TransferError) -> None:
        log.warning("engine_refused", engine=engine[:80], reason=error.reason, error=str(error))
        self._desks.metrics.registration_ended(error.reason)
        self.send(Refused(reason=error.reason, message=str(error)))
        self.end(REFUSED)

    def _take_from_worker(self, reader: Registration, rank: int, message: FromEngine) -> None:
        match message:
            case StartPull():
                self._desks.pulls.start(reader, rank, self, message)
            case CancelPull():
                self._desks.pulls.cancel(self, message.id)
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__}")

    def _take_from_scheduler(self, engine: Registration, message: FromEngine) -> None:
        match message:
            case OpenLease():
                self._desks.source.lease_opened(engine, message)
            case LeaseClosed():
                # Of its own lease, of another's, or of its own that came back to it.
                self._desks.source.lease_closed(engine, message.lease, message.why)
                self._desks.lookups.forget(engine.engine, message.lease, message.why)
            case Lookup():
                self._look_up(engine, message)
            case _:
                raise ProtocolError(f"a scheduler does not send {type(message).__name__}")

    def _look_up(self, reader: Registration, message: Lookup) -> None:
        self._desks.lookups.asked(reader.engine, message)
        if len(self._lookups) >= _MAX_LOOKUPS:
            self._desks.metrics.lookup_ended(Reason.BUSY)
            text = f"{_MAX_LOOKUPS} lookups are under way already"
            self.send(LookupDone(id=message.id, num_tokens=0, reason=Reason.BUSY, message=text))
            return
        task = asyncio.create_task(self._answer_lookup(reader, message))
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)

    async def _answer_lookup(self, reader: Registration, message: Lookup) -> None:
        try:
            answer = await self._desks.lookups.lookup(reader, message)
        except Exception as error:
            log.exception("lookup_is_defect")
            answer = LookupDone(
                id=message.id, num_tokens=0, reason=Reason.INTERNAL, message=repr(error)
            )
        if answer.num_tokens and not message.address.is_store:
            self._sessions.on_found(message.address.node)
        self.send(answer)
