"""A small reader of KV events for tests: raw frames in, nothing interpreted.

A SUB socket repeats its subscription to a restarted publisher only while someone works the socket,
so messages are pumped into a queue all the time, not when a test asks for one.
"""

import asyncio
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from tests.doubles.engine.server import EngineDouble

_QUEUED_MESSAGES = 10_000


class EventReader:
    """Subscribes to one rank of a double; every wait ends after ``timeout_seconds``."""

    def __init__(
        self, engine: EngineDouble, *, rank: int = 0, timeout_seconds: float = 5.0
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RECONNECT_IVL, 10)
        self._messages: asyncio.Queue[list[bytes]] = asyncio.Queue(_QUEUED_MESSAGES)
        self._pumping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._live.subscribe(b"")
        self._live.connect(self._engine.kv_events_endpoints[self._rank])
        self._pumping = asyncio.create_task(self._pump())
        await self._engine.wait_for_subscribers(rank=self._rank)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._pumping is not None:
            self._pumping.cancel()
            await asyncio.gather(self._pumping, return_exceptions=True)
        self._context.destroy(linger=0)

    async def frames(self) -> list[bytes]:
        """Return the frames of the next message."""
        async with asyncio.timeout(self._timeout_seconds):
            return await self._messages.get()

    async def batch(self) -> tuple[int, list[Any]]:
        """Return the sequence and the events of the next message."""
        _, sequence, payload = await self.frames()
        return int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)[1]

    async def batches(self, count: int) -> list[tuple[int, list[Any]]]:
        """Return the next ``count`` messages."""
        return [await self.batch() for _ in range(count)]

    async def replay(self, first: int) -> list[list[bytes]]:
        """Ask for everything from ``first`` and return the replies up to the end marker."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._engine.kv_replay_endpoints[self._rank])
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        replies: list[list[bytes]] = []
        async with asyncio.timeout(self._timeout_seconds):
            while not replies or replies[-1][-1]:
                replies.append(await socket.recv_multipart())
        socket.close(linger=0)
        return replies

    async def _pump(self) -> None:
        while True:
            await self._messages.put(await self._live.recv_multipart())
