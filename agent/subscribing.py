"""Following one engine's KV events over ZMQ (reference/vllm.md 1.1, 1.5).

The loop is a thin shell around :class:`~nearkv.agent.engine_tracking.EngineTracker`: it
receives, asks for a replay when the tracker wants one, and reports connection loss. ZMQ
reconnects by itself; what was missed meanwhile shows as a gap.
"""

import asyncio
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

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SubscriptionLimits:
    """Bounds of a subscription."""

    queue_messages: int = 100_000
    message_bytes: int = 64 << 20
    replay_step_seconds: float = 5.0
    replay_messages: int = 100_000
    replay_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Notifications:
    """What a subscription calls: the clock, "state changed", and "the peer hung up"."""

    now: Callable[[], float]
    changed: Callable[[], None]
    suspect: Callable[[], None]


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
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, self._limits.queue_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.subscribe(self._source.topic)
        monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        try:
            if not self._connect(socket, self._source.endpoint):
                self._tracker.on_subscription(connected=False)
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

    def _connect(self, socket: zmq.asyncio.Socket, endpoint: str) -> bool:
        """Connect in the background; False where the endpoint is no address."""
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._log.warning("event_endpoint_unusable", asked=endpoint, error=str(error))
            return False
        return True

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        while True:
            await self._handle(await socket.recv_multipart())
            with suppress(zmq.Again):
                for _ in range(_DRAIN_MESSAGES):
                    await self._handle(plain.recv_multipart(zmq.NOBLOCK))
            self._changed()
            await asyncio.sleep(0)

    async def _handle(self, frames: list[bytes]) -> None:
        match frames:
            case [_topic, seq_bytes, payload] if len(seq_bytes) == _SEQ.size:
                (seq,) = _SEQ.unpack(seq_bytes)
            case _:
                self._tracker.counts.undecodable += 1
                return
        async with self._replay_lock:
            arrival = self._tracker.on_message(seq, payload, self._now())
            if arrival in (Arrival.IN_ORDER, Arrival.REPEAT):
                return
            self._log.info("events_out_of_step", arrival=arrival.value, seq=seq)
            await self._replay()
            self._tracker.on_message_after_replay(seq, payload, self._now())

    async def _replay_on_request(self) -> None:
        while True:
            await self._replay_wanted.wait()
            self._replay_wanted.clear()
            async with self._replay_lock:
                await self._replay()

    async def _replay(self) -> None:
        """Ask for what is missing and apply it; leaves the table consistent in any case."""
        asked = self._tracker.next_wanted
        if self._source.replay_endpoint is None:
            messages = None
        else:
            self._tracker.on_replay_started()
            self._changed()
            messages = await self._fetch_replay(self._source.replay_endpoint, asked)
        self._tracker.on_replay(asked, messages, self._now())
        self._changed()
        if messages is None and self._source.replay_endpoint is not None:
            self._log.warning("replay_unanswered", asked=asked)

    async def _fetch_replay(self, endpoint: str, asked: int) -> list[tuple[int, bytes]] | None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        socket.setsockopt(zmq.RCVHWM, self._limits.queue_messages)
        try:
            if not self._connect(socket, endpoint):
                return None
            # Live messages wait meanwhile: an engine that drips must not hold them for ever.
            async with asyncio.timeout(self._limits.replay_seconds):
                await socket.send_multipart([b"", _SEQ.pack(asked)])
                return [message async for message in self._replies(socket)]
        except TimeoutError:
            return None
        finally:
            socket.close(linger=0)

    async def _replies(self, socket: zmq.asyncio.Socket) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (seq, payload) up to the end marker; both framings are understood."""
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
            yield seq, payload

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
