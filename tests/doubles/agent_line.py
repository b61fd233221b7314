"""An engine's connection to its agent: the real socket protocol, message by message."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nearkv.transfer.framing import FrameReader, encode_frame, send_with_fds
from nearkv.transfer.messages import ToEngine

ANSWER_SECONDS = 40.0


class Line:
    """One connection to the agent; ``messages`` holds what came and nobody waited for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        # The decoder takes the union, which is no class for the type checker.
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)  # type: ignore[arg-type] # see above
        self._task: asyncio.Task[None] | None = None
        self.messages: asyncio.Queue[ToEngine] = asyncio.Queue()
        self.ended = asyncio.Event()

    @property
    def raw(self) -> socket.socket:
        """The socket, for tests that talk nonsense on it."""
        assert self._sock is not None
        return self._sock

    def connect(self) -> None:
        """Connect, and begin to listen."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            raise
        self._sock = sock
        self._task = asyncio.create_task(self._listen(sock))

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message with its descriptors; waits for room in the socket."""
        self.raw.settimeout(ANSWER_SECONDS)
        try:
            send_with_fds(self.raw, encode_frame(message), fds)
        finally:
            self.raw.settimeout(0)

    async def next(self) -> ToEngine:
        """Return the next message; fails when the connection ends first."""
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self.messages.get()

    async def close(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def _listen(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(sock, 1 << 16):
                for message, _ in self._reader.feed(data):
                    self.messages.put_nowait(message)
        except OSError:
            pass
        finally:
            self.ended.set()
