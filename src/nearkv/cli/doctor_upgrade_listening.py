"""Listening to an engine's KV events for a moment, and asking for a replay (a thin shell)."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from nearkv.agent.event_sources import EventSource
from nearkv.cli.doctor_upgrade_model import EventMessage, Replay

_SEQ = struct.Struct(">Q")
_SIGNED_SEQ = struct.Struct(">q")
_END_OF_REPLAY = -1
_MESSAGE_BYTES = 32 << 20
_MOST_MESSAGES = 2_000
_MOST_BYTES = 64 << 20
_MOST_REPLIES = 1_000
_PLAIN_FRAMES = 3


class ListeningError(Exception):
    """An engine's event socket cannot be listened to; the message is for people."""


class EventListener:
    """A subscription to one event source; use as ``async with``.

    Entering waits until the engine has taken the connection, ``seconds`` at most, and raises
    :class:`ListeningError`.
    """

    def __init__(
        self, source: EventSource, *, context: zmq.asyncio.Context, seconds: float
    ) -> None:
        self._source = source
        self._context = context
        self._seconds = seconds
        self._socket: zmq.asyncio.Socket | None = None
        self._size_bytes = 0
        self.messages: list[EventMessage] = []

    async def __aenter__(self) -> Self:
        """Connect and subscribe to everything."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, _MOST_MESSAGES)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.subscribe("")
            socket.connect(self._source.endpoint)
            async with asyncio.timeout(self._seconds):
                await monitor.recv_multipart()
        except zmq.ZMQError as error:
            raise ListeningError(f"{self._source.endpoint}: {error}") from error
        except TimeoutError as error:
            why = "nothing accepts connections there"
            raise ListeningError(f"{self._source.endpoint}: {why}") from error
        else:
            self._socket = socket
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            if self._socket is None:
                socket.close(linger=0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close(linger=0)

    async def collect(self, is_last: Callable[[EventMessage], bool], *, seconds: float) -> None:
        """Add messages up to the one that ``is_last``, or until the time or the room is over.

        A busy engine also tells of other clients' prompts.
        """
        assert self._socket is not None  # noqa: S101 (only used when entered)
        try:
            async with asyncio.timeout(seconds):
                while len(self.messages) < _MOST_MESSAGES and self._size_bytes < _MOST_BYTES:
                    message = _read(await self._socket.recv_multipart())
                    self.messages.append(message)
                    self._size_bytes += len(message.payload)
                    if is_last(message):
                        return
        except TimeoutError:
            return

    async def ask_replay(self, endpoint: str, *, start: int, seconds: float) -> Replay | None:
        """Ask for what was published from ``start`` on; ``None`` where no whole answer came."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, _MOST_REPLIES)
        try:
            socket.connect(endpoint)
            async with asyncio.timeout(seconds):
                await socket.send_multipart([b"", _SEQ.pack(start)])
                return await _count_replies(socket)
        except (zmq.ZMQError, TimeoutError):
            return None
        finally:
            socket.close(linger=0)


async def _count_replies(socket: zmq.asyncio.Socket) -> Replay:
    """Read up to the end marker, or as much as shows that the engine answers."""
    framing = ""
    for count in range(_MOST_REPLIES):
        frames = await socket.recv_multipart()
        framing = framing or _framing(frames)
        if _signed_seq(frames) == _END_OF_REPLAY:
            return Replay(count, framing)
    return Replay(_MOST_REPLIES, framing)


def _read(frames: Sequence[bytes]) -> EventMessage:
    match frames:
        case [topic, seq, payload] if len(seq) == _SEQ.size:
            return EventMessage(topic, _SEQ.unpack(seq)[0], payload)
        case _:
            return EventMessage(b"", None, frames[-1])


def _signed_seq(frames: Sequence[bytes]) -> int | None:
    match frames:
        case [b"", *_, seq, _payload] if len(seq) == _SIGNED_SEQ.size:
            return int(_SIGNED_SEQ.unpack(seq)[0])
        case _:
            return None


def _framing(frames: Sequence[bytes]) -> str:
    return "plain" if len(frames) <= _PLAIN_FRAMES else "topic"
