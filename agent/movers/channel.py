"""The agent's end of a mover's control socket: never blocks, keeps order."""

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from nearkv.agent.movers.messages import FromMover
from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.framing import FrameReader, encode_frame, receive_with_fds


@dataclass(slots=True)
class _Outgoing:
    """What is left of a frame. Its descriptors are duplicates, and go with its first byte."""

    rest: memoryview
    fds: list[int]


class Channel:
    """Sends and receives on a socket that belongs to it; call all methods on the loop's thread.

    ``on_message`` gets each message, ``on_lost`` is called once, when the other end is closed
    or talks nonsense; nothing is sent or received afterwards.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[FromMover], None],
        on_lost: Callable[[], None],
    ) -> None:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader: FrameReader[FromMover] = FrameReader(FromMover)  # type: ignore[arg-type]  # a union
        self._outgoing: deque[_Outgoing] = deque()
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._receive)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message, now or when the socket has room; ``fds`` may be closed afterwards.

        Nothing happens when the channel is closed. Raises ``OSError`` for bad descriptors and
        :class:`ProtocolError` for a message that is too large.
        """
        if self._closed:
            return
        frame = encode_frame(message)
        duplicates: list[int] = []
        try:
            duplicates.extend(os.dup(fd) for fd in fds)
        except OSError:
            _close_all(duplicates)
            raise
        self._outgoing.append(_Outgoing(memoryview(frame), duplicates))
        if len(self._outgoing) == 1:
            self._flush()

    def close(self) -> None:
        """Close the socket; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._reader.close()
        while self._outgoing:
            _close_all(self._outgoing.popleft().fds)

    def _flush(self) -> None:
        try:
            while self._outgoing:
                first = self._outgoing[0]
                sent = self._sock.sendmsg([first.rest], _ancillary(first.fds))
                _close_all(first.fds)
                first.rest = first.rest[sent:]
                if not first.rest:
                    self._outgoing.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        except OSError:
            self._lose()
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _receive(self) -> None:
        try:
            data, fds = receive_with_fds(self._sock)
            messages = self._reader.feed(data, fds)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._lose()
            return
        for message, _ in messages:
            self._on_message(message)
        if not data:
            self._lose()

    def _lose(self) -> None:
        if not self._closed:
            self.close()
            self._on_lost()


def _ancillary(fds: list[int]) -> list[tuple[int, int, bytes]]:
    if not fds:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
