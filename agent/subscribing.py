"""Following one engine's KV events over ZMQ (reference/vllm.md 1.1, 1.5).

The loop is a thin shell around :class:`~nearkv.agent.engine_tracking.EngineTracker`: it
receives, asks for a replay when the tracker wants one, and reports connection loss. ZMQ
reconnects by itself; what was missed meanwhile shows as a gap.
"""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.event_sources import EventSource
from nearkv.agent.sequencing import Arrival

_SEQ = struct.Struct(">Q")
_SIGNED_SEQ = struct.Struct(">q")
_END_OF_REPLAY = -1
_DRAIN_MESSAGES = 64
"""Messages taken without yielding, so that HTTP consumers are never starved."""
_SLICE_SECONDS = 0.005
"""Longest time of taking messages without yielding; a replay may bring a second's work."""
_MOST_SEQ = 1 << 62
"""A number beyond is nonsense, and one more would not fit into the question for a replay."""
_MAX_SOCKETS = 16_384
"""ZMQ's own limit is 1,023, and each rank takes three sockets, four during a replay."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SubscriptionLimits:
    """Bounds of a subscription."""

    queue_messages: int = 10_000
    message_bytes: int = 32 << 20
    replay_step_seconds: float = 5.0
    replay_messages: int = 100_000
    replay_bytes: int = 256 << 20
    replay_seconds: float = 60.0
    retry_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Notifications:
    """What a subscription calls: the clock, "state changed", and "the peer hung up"."""

    now: Callable[[], float]
    changed: Callable[[], None]
    suspect: Callable[[], None]


class _ReplayTooLargeError(Exception):
    """An engine answers more than its replay may take of the memory."""


def open_context() -> zmq.asyncio.Context:
    """Return a ZMQ context that has sockets enough for a node's engines with all their ranks."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


class EventSubscription:
    """Feeds one tracker from one event source until cancelled.

    An endpoint that cannot be an address ends it with the events ``lost``; scrapes go on.
    """

    def __init__(
        self,
        source: EventSource,
        tracker: EngineTracker,
        *,
        context: zmq.asyncio.Context,
        notify: Notifications,
        limits: SubscriptionLimits = SubscriptionLimits(),
    ) -> None:
        self._source = source
        self._tracker = tracker
        self._context = context
        self._now = notify.now
        self._changed = notify.changed
        self._suspect = notify.suspect
        self._limits = limits
        self._replay_wanted = asyncio.Event()
        # Messages wait while a replay runs, so that both are applied in order.
        self._replay_lock = asyncio.Lock()
        self._log = log.bind(engine=tracker.identity.id, endpoint=source.endpoint)

    def request_replay(self) -> None:
        """Ask for a replay from what the tracker wants next (after a restart, say)."""
        self._replay_wanted.set()

    async def run(self) -> None:
        """Subscribe, catch up by replay, and follow until cancelled."""
        self._tracker.on_subscription(connected=False)
        socket, monitor = await self._open_sockets()
        try:
            if not self._connect(socket, self._source.endpoint):
                return
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_connection(monitor))
                tasks.create_task(self._replay_on_request())
                tasks.create_task(self._follow(socket))
                self.request_replay()
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    async def _open_sockets(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Return a socket and its monitor, as soon as there are any to be had."""
        while True:
            socket = self._socket(zmq.SUB)
            if socket is not None:
                socket.setsockopt(zmq.RECONNECT_IVL, 100)
                socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
                socket.subscribe(self._source.topic)
                with suppress(zmq.ZMQError):
                    events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
                    return socket, socket.get_monitor_socket(events)
                socket.close(linger=0)
            jitter = random.uniform(0.75, 1.25)  # noqa: S311 (spreads load, guards nothing)
            await asyncio.sleep(self._limits.retry_seconds * jitter)

    def _socket(self, kind: int) -> zmq.asyncio.Socket | None:
        """Return a bounded socket; ``None`` where the process may have no more of them."""
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            self._log.warning("no_event_socket", error=str(error))
            return None
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        socket.setsockopt(zmq.RCVHWM, self._limits.queue_messages)
        return socket

    def _connect(self, socket: zmq.asyncio.Socket, endpoint: str) -> bool:
        """Connect in the background; False where the endpoint is no address."""
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._log.warning(
                "event_endpoint_unusable", asked=endpoint[:200], error=str(error)[:200]
            )
            return False
        return True

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        while True:
            await self._handle(await socket.recv_multipart())
            began = self._now()
            with suppress(zmq.Again):
                for _ in range(_DRAIN_MESSAGES):
                    if self._now() - began > _SLICE_SECONDS:
                        break
                    await self._handle(plain.recv_multipart(zmq.NOBLOCK))
            self._changed()
            await asyncio.sleep(0)

    async def _handle(self, frames: list[bytes]) -> None:
        match frames:
            case [_topic, seq_bytes, payload] if len(seq_bytes) == _SEQ.size:
                (seq,) = _SEQ.unpack(seq_bytes)
            case _:
                seq = _MOST_SEQ
        if seq >= _MOST_SEQ:
            self._tracker.counts.undecodable += 1
            return
        async with self._replay_lock:
            arrival = self._tracker.on_message(seq, payload, self._now())
            if arrival in (Arrival.IN_ORDER, Arrival.REPEAT):
                return
            self._log.info("events_out_of_step", arrival=arrival.value, seq=seq)
            if await self._replay():
                self._tracker.on_message_after_replay(seq, payload, self._now())

    async def _replay_on_request(self) -> None:
        while True:
            await self._replay_wanted.wait()
            self._replay_wanted.clear()
            async with self._replay_lock:
                await self._replay()

    async def _replay(self) -> bool:
        """Ask for what is missing and apply it; leaves the table consistent in any case.

        False where the engine turned out to be another process meanwhile: what was received of
        the old one is dropped, and the new one is asked again.
        """
        tracker, stream = self._tracker, self._tracker.stream
        asked = tracker.next_wanted
        if self._source.replay_endpoint is None:
            messages = None
        else:
            tracker.on_replay_started()
            self._changed()
            messages = await self._fetch_replay(self._source.replay_endpoint, asked)
        began = self._now()
        for _ in tracker.replaying(asked, messages, began) if stream == tracker.stream else ():
            if self._now() - began > _SLICE_SECONDS:
                self._changed()
                await asyncio.sleep(0)
                began = self._now()
                if stream != tracker.stream:
                    break
        if stream != tracker.stream:
            tracker.on_replay_given_up()
            self.request_replay()
        self._changed()
        if messages is None and self._source.replay_endpoint is not None:
            self._log.warning("replay_unanswered", asked=asked)
        return stream == tracker.stream

    async def _fetch_replay(self, endpoint: str, asked: int) -> list[tuple[int, bytes]] | None:
        socket = self._socket(zmq.DEALER)
        if socket is None:
            return None
        # The engine drops what does not fit: all of it has to.
        socket.setsockopt(zmq.RCVHWM, self._limits.replay_messages)
        try:
            if not self._connect(socket, endpoint):
                return None
            # Live messages wait meanwhile: an engine that drips must not hold them for ever.
            async with asyncio.timeout(self._limits.replay_seconds):
                await socket.send_multipart([b"", _SEQ.pack(asked)])
                return [message async for message in self._replies(socket)]
        except (TimeoutError, _ReplayTooLargeError):
            return None
        finally:
            socket.close(linger=0)

    async def _replies(self, socket: zmq.asyncio.Socket) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (seq, payload) up to the end marker; both framings are understood."""
        room_bytes = self._limits.replay_bytes
        for _ in range(self._limits.replay_messages):
            async with asyncio.timeout(self._limits.replay_step_seconds):
                frames = await socket.recv_multipart()
            match frames:
                case [b"", *_, seq_bytes, payload] if len(seq_bytes) == _SIGNED_SEQ.size:
                    (seq,) = _SIGNED_SEQ.unpack(seq_bytes)
                case _:
                    self._tracker.counts.undecodable += 1
                    continue
            if seq == _END_OF_REPLAY:
                return
            room_bytes -= len(payload)
            if room_bytes < 0:
                raise _ReplayTooLargeError
            if 0 <= seq < _MOST_SEQ:
                yield seq, payload
            else:
                self._tracker.counts.undecodable += 1

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        lost = False
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            connected = event["event"] == zmq.EVENT_CONNECTED
            self._tracker.on_subscription(connected=connected)
            self._changed()
            if connected and lost:
                # What was published while the connection was away shows as a gap only once
                # more is published: an idle engine would leave it unseen.
                self.request_replay()
            lost = not connected
            if lost:
                self._log.info("event_stream_disconnected")
                self._suspect()
