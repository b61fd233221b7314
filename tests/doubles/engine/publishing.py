"""KV event sockets of one rank: a PUB side for live batches, a ROUTER side for replay.

The PUB side is an XPUB socket, which speaks the same protocol but shows subscriptions, so that
a test can wait for its subscriber instead of sleeping. Sends never block: like vLLM's publisher,
a slow subscriber loses batches and must ask for a replay.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import zmq
import zmq.asyncio

from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.events import Event, EventEncoding

_END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.005
SEND_LIMIT_MESSAGES = 100_000
_GARBAGE = b"\xc1 not msgpack"


class EventPublisher:
    """Numbers, buffers and sends the event batches of one rank.

    ``drop_batches`` and ``garbage_batches`` count down: a dropped batch is numbered and kept for
    replay but not sent; a garbage one is sent as bytes that are not msgpack, and kept intact.
    """

    def __init__(self, config: EngineDoubleConfig, *, rank: int) -> None:
        self._topic = config.topic.encode()
        self._framing = config.replay_framing
        self._encoding = EventEncoding(config.event_encoding, config.block_hash_form)
        self._rank = rank
        self._bind_seconds = config.bind_seconds
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_sequence = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._context.socket(zmq.XPUB)
        self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
        self._live.setsockopt(zmq.SNDHWM, SEND_LIMIT_MESSAGES)
        # A replay is bounded by the buffer; a lower limit here would cut it without a word.
        self._replay.setsockopt(zmq.SNDHWM, 0)
        self._answering: asyncio.Task[None] | None = None
        self._subscriptions = 0
        self.endpoint = ""
        self.replay_endpoint = ""
        self.drop_batches = 0
        self.garbage_batches = 0

    async def start(self, *, endpoint: str, replay_endpoint: str) -> None:
        """Bind both sockets (``tcp://host:*`` picks a port) and answer replays.

        Raises:
            zmq.ZMQError: when an address is still taken after ``bind_seconds``.
        """
        self.endpoint = await _bind(self._live, endpoint, self._bind_seconds)
        self.replay_endpoint = await _bind(self._replay, replay_endpoint, self._bind_seconds)
        self._answering = asyncio.create_task(self._answer_replays(), name="kv-replay")

    def stop(self) -> None:
        """Close the sockets at once; unsent batches are lost, as when a process dies."""
        if self._answering is not None:
            self._answering.cancel()
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()

    @property
    def next_sequence(self) -> int:
        """Number of the next batch; it starts at 0 with the process."""
        return self._next_sequence

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; nothing for no events, nor after ``stop``."""
        if not events or self._live.closed:
            return
        sequence = self._next_sequence
        self._next_sequence += 1
        payload = self._encoding.encode_batch(events, timestamp=time.time(), rank=self._rank)
        self._buffer.append((sequence, payload))
        if self.drop_batches:
            self.drop_batches -= 1
            return
        if self.garbage_batches:
            self.garbage_batches -= 1
            payload = _GARBAGE
        with suppress(zmq.Again):
            self._live.send_multipart(
                [self._topic, sequence.to_bytes(8, "big"), payload], flags=zmq.NOBLOCK
            )

    async def wait_for_subscribers(self, count: int, *, timeout_seconds: float) -> None:
        """Return once ``count`` subscriptions are in effect.

        Raises:
            TimeoutError: when they are not within ``timeout_seconds``.
        """
        async with asyncio.timeout(timeout_seconds):
            # The socket tells of subscriptions only when read; nothing could set an event.
            while self._count_subscriptions() < count:  # noqa: ASYNC110 - see above
                await asyncio.sleep(_POLL_SECONDS)

    def _count_subscriptions(self) -> int:
        with suppress(zmq.Again):
            while True:
                message = self._live.recv(flags=zmq.NOBLOCK)
                self._subscriptions += 1 if message[:1] == b"\x01" else -1
        return self._subscriptions

    async def _answer_replays(self) -> None:
        while True:
            identity, *rest = await self._replay.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != 8:
                continue
            first = int.from_bytes(rest[1], "big")
            for sequence, payload in list(self._buffer):
                if sequence >= first:
                    await self._reply(identity, sequence.to_bytes(8, "big"), payload)
            await self._reply(identity, _END_SEQUENCE, b"")

    async def _reply(self, identity: bytes, sequence: bytes, payload: bytes) -> None:
        # Seen in a capture of 0.32: the end marker carries an empty topic.
        topic = [self._topic if payload else b""] if self._framing == "topic" else []
        await self._replay.send_multipart([identity, b"", *topic, sequence, payload])


async def _bind(
    socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str, limit_seconds: float
) -> str:
    """Bind, waiting for the previous owner of a fixed port to let go of it."""
    deadline = time.monotonic() + limit_seconds
    socket.setsockopt(zmq.LINGER, 0)
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            await asyncio.sleep(_POLL_SECONDS)
        else:
            bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
            return bound.decode().rstrip("\0")
