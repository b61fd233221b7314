"""Connections to engines, kept for the next request."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohappyeyeballs

from nearkv.ingress.upstream.connection import EngineConnection
from nearkv.ingress.upstream.errors import NotReachedError
from nearkv.ingress.upstream.heads import Origin

_SECOND_ADDRESS_AFTER_SECONDS = 0.25

SocketFactory = Callable[[tuple[Any, ...]], socket.socket]


class EnginePool:
    """Opens connections and keeps free ones for ``idle_seconds``, the last used first.

    No limit on their number: requests in flight are bounded by whoever sends them.
    """

    def __init__(
        self,
        *,
        connect_seconds: float,
        idle_seconds: float,
        socket_factory: SocketFactory | None = None,
    ) -> None:
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._socket_factory = socket_factory
        self._free: dict[Origin, list[EngineConnection]] = {}
        self._open: set[EngineConnection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    def close(self) -> None:
        """Close all connections; answers under way fail."""
        self._is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in tuple(self._open):
            connection.close()
        self._free.clear()

    @property
    def open_connections(self) -> int:
        """How many connections there are."""
        return len(self._open)

    def take(self, origin: Origin) -> EngineConnection | None:
        """Return a connection that is free, where there is one."""
        free = self._free.get(origin)
        while free:
            connection = free.pop()
            if not connection.is_open:
                continue
            if asyncio.get_running_loop().time() - connection.idle_since <= self._idle_seconds:
                return connection
            connection.close()
        return None

    async def connect(self, origin: Origin, seconds: float | None = None) -> EngineConnection:
        """Return a new connection, by ``seconds`` if that is less than the usual time.

        Raises :class:`NotReachedError`.
        """
        if self._is_closed:
            raise NotReachedError("the ingress is closing")
        limit = self._connect_seconds if seconds is None else min(seconds, self._connect_seconds)
        try:
            async with asyncio.timeout(limit):
                return await self._connect(origin)
        except TimeoutError as error:
            raise NotReachedError(
                f"connecting to {origin.authority} took over {limit:g} s"
            ) from error
        except (OSError, UnicodeError) as error:  # the latter of names that are none
            raise NotReachedError(f"connecting to {origin.authority}: {error}") from error

    async def _connect(self, origin: Origin) -> EngineConnection:
        loop = asyncio.get_running_loop()
        tls = await self._tls_context() if origin.is_tls else None
        addresses = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        made = await aiohappyeyeballs.start_connection(
            addresses,
            happy_eyeballs_delay=_SECOND_ADDRESS_AFTER_SECONDS,
            socket_factory=self._socket_factory,
        )
        _, connection = await loop.create_connection(
            lambda: EngineConnection(partial(self._put, origin), self._open.discard),
            sock=made,
            ssl=tls,
            server_hostname=origin.host if origin.is_tls else None,
        )
        self._open.add(connection)
        return connection

    async def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:  # reads the system's certificates, which takes its time
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls

    def _put(self, origin: Origin, connection: EngineConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        free = self._free.get(origin)
        if free is None:
            free = self._free[origin] = []
        free.append(connection)
        if self._sweeping is None and not self._is_closed:
            self._sweeping = loop.call_later(self._idle_seconds, self._sweep)

    def _sweep(self) -> None:
        """Close what was free for too long; engines that are gone leave nothing behind."""
        loop = asyncio.get_running_loop()
        since = loop.time() - self._idle_seconds
        for origin, free in tuple(self._free.items()):
            for connection in free:
                if connection.idle_since < since:
                    connection.close()
            free[:] = [one for one in free if one.is_open]
            if not free:
                del self._free[origin]
        self._sweeping = None
        if self._free:
            self._sweeping = loop.call_later(self._idle_seconds, self._sweep)
