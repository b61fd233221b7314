"""One connection of an engine: frames and descriptors on a non-blocking Unix socket.

``loop.add_reader`` and not a transport: descriptors travel beside the bytes, and asyncio's and
uvloop's transports take none.
"""

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.framing import FrameReader, encode_frame, receive_with_fds
from nearkv.transfer.messages import FromEngine

EOF = "eof"
MALFORMED = "malformed"
TOO_SLOW = "too_slow"
DEFECT = "defect"

_CREDENTIALS = struct.Struct("3i")
_READ_BYTES = 1 << 18
_READS_PER_TURN = 4
_SEND_LIMIT_BYTES = 16 << 20

log = structlog.get_logger(__name__)


def peer_uid(sock: socket.socket) -> int:
    """Return who is at the other end. Its pid means nothing across namespaces."""
    option = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(option)
    return int(uid)


class Connection:
    """Hands each whole message with its descriptors to ``on_message``, which then owns them.

    ``on_message`` may raise :class:`ProtocolError`. ``on_end`` is called once, with the cause,
    when the connection has ended, unless :meth:`close` ended it.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[FromEngine, list[int]], None],
        on_end: Callable[[str], None],
    ) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_end = on_end
        # The decoder takes the union, which is no class for the type checker.
        self._reader: FrameReader[FromEngine] = FrameReader(FromEngine)  # type: ignore[arg-type] # see above
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._open = True
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def is_open(self) -> bool:
        """Tell whether messages can still be sent."""
        return self._open

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, at once or when there is room; an end that takes nothing is cut off."""
        if not self._open:
            return
        self._unsent.append(memoryview(encode_frame(message)))
        self._unsent_bytes += len(self._unsent[-1])
        if len(self._unsent) == 1:
            self._write()
            if self._open and self._unsent:
                self._loop.add_writer(self._sock.fileno(), self._writable)
        if self._unsent_bytes > _SEND_LIMIT_BYTES:
            self._end(TOO_SLOW)

    def close(self) -> None:
        """End the connection; what is not sent yet is lost."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._reader.close()
        self._unsent.clear()
        self._sock.close()

    def _end(self, cause: str) -> None:
        if self._open:
            self.close()
            self._on_end(cause)

    def _readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if not self._open or not self._read():
                return

    def _read(self) -> bool:
        """Take what is there; False when there was nothing, or the connection ended."""
        try:
            data, fds = receive_with_fds(self._sock, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except ProtocolError as error:
            self._refuse(error)
            return False
        except OSError:
            data, fds = b"", []
        if not data:
            self._end(EOF)
            return False
        self._take(data, fds)
        return True

    def _take(self, data: bytes, fds: list[int]) -> None:
        try:
            messages = self._reader.feed(data, fds)
        except ProtocolError as error:
            self._refuse(error)
            return
        for message, taken in messages:
            if not self._open:
                close_fds(taken)
                continue
            try:
                self._on_message(message, taken)
            except ProtocolError as error:
                self._refuse(error)
            except Exception:
                # What it set off is not all done: its engine starts anew, others go on.
                log.exception("engine_message_is_defect", message=type(message).__name__)
                self._end(DEFECT)

    def _refuse(self, error: ProtocolError) -> None:
        log.warning("engine_talks_nonsense", error=str(error))
        self._end(MALFORMED)

    def _writable(self) -> None:
        self._write()
        if self._open and not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # Reported when the end is read: not within whoever wanted to send.
            self._unsent.clear()
            self._unsent_bytes = 0


def close_fds(fds: list[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)
