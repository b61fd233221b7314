"""An engine process's connection to its node's agent, kept alive by a thread of its own.

The engine's threads never wait for the agent: they put messages into a bounded queue and get
answers through a callback. A lost agent is looked for again with growing, jittered pauses,
and what was registered is registered anew (descriptors are sent again), so an agent may be
restarted under a running engine.
"""

import contextlib
import logging
import os
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.framing import FrameReader, encode_frame, receive_with_fds, send_with_fds
from nearkv.transfer.messages import Refused, Registered, ToEngine

QUEUE_LIMIT = 65_536
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
_SEND_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hello:
    """What is said first on every new connection: a registration and its descriptors."""

    message: msgspec.Struct
    fds: Sequence[int]


class AgentClient:
    """Keeps one registration with the agent.

    ``hello`` is asked on every connection for what to register. ``on_message`` gets each
    message after the registration, ``on_lost`` is called when a registered connection ended,
    with whether it was the agent that ended it: one that was given up here, since it took
    nothing any more, may live on and its movers with it. Both run on the client's thread and
    must not block.
    """

    def __init__(
        self,
        path: Path,
        hello: Callable[[], Hello],
        *,
        on_message: Callable[[ToEngine], None],
        on_lost: Callable[[bool], None],
    ) -> None:
        self._path = path
        self._hello = hello
        self._on_message = on_message
        self._on_lost = on_lost
        self._queue: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False
        self._registered: Registered | None = None
        self._last_trouble = ""
        self._thread = threading.Thread(target=self._run, name="nearkv-agent-client", daemon=True)

    @property
    def registered(self) -> Registered | None:
        """The agent's word on the present registration, or ``None`` while there is none."""
        return self._registered

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message; False when nobody is registered or too much is queued already."""
        frame = encode_frame(message)
        with self._lock:
            if self._registered is None or len(self._queue) >= QUEUE_LIMIT:
                return False
            self._queue.append(frame)
        self._wake()
        return True

    def close(self) -> None:
        """End the connection and the thread; waits for it a short while.

        The wake-up pipe stays open: a late :meth:`send` must not write into a file that
        got its number.
        """
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(_SEND_SECONDS)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full means that it will wake anyway
            os.write(self._wake_out, b"x")

    # -- The thread --------------------------------------------------------------------

    def _run(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._stopping:
            started = time.monotonic()
            agent_ended_it = False
            try:
                agent_ended_it = self._serve_one_connection()
            except (OSError, ProtocolError) as error:
                agent_ended_it = isinstance(error, ConnectionError)
                self._tell_trouble(f"{type(error).__name__}: {error}")
            finally:
                self._forget_registration(agent_ended_it)
            if time.monotonic() - started > _LONGEST_PAUSE_SECONDS:
                pause_seconds = _FIRST_PAUSE_SECONDS
            self._pause(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)

    def _tell_trouble(self, trouble: str) -> None:
        """Log a trouble once, not at every try."""
        if trouble != self._last_trouble:
            self._last_trouble = trouble
            log.warning("nearkv: no agent at %s (%s); serving without", self._path, trouble)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            while not self._stopping and (left := end - time.monotonic()) > 0:
                if selector.select(left):
                    self._drain_wakes()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_in, 4096)

    def _serve_one_connection(self) -> bool:
        """Return whether the agent ended the connection; raises when it broke otherwise."""
        reader: FrameReader[ToEngine] = FrameReader(ToEngine)  # type: ignore[arg-type] # a union
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_CONNECT_SECONDS)
            sock.connect(str(self._path))
            sock.settimeout(_SEND_SECONDS)
            hello = self._hello()
            send_with_fds(sock, encode_frame(hello.message), hello.fds)
            try:
                return self._converse(sock, reader)
            finally:
                reader.close()

    def _converse(self, sock: socket.socket, reader: FrameReader[ToEngine]) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake_in, selectors.EVENT_READ)
            while not self._stopping:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_in in ready:
                    self._drain_wakes()
                    self._send_queued(sock)
                if sock in ready and not self._receive(sock, reader):
                    self._tell_trouble("it closed the connection")
                    return True
        return False

    def _send_queued(self, sock: socket.socket) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                frames = b"".join(self._queue)
                self._queue.clear()
            sock.sendall(frames)

    def _receive(self, sock: socket.socket, reader: FrameReader[ToEngine]) -> bool:
        data, fds = receive_with_fds(sock)
        if not data:
            return False
        for message, taken in reader.feed(data, fds):
            for fd in taken:  # nothing that an agent says brings descriptors
                os.close(fd)
            if isinstance(message, Registered):
                with self._lock:
                    self._registered = message
                self._last_trouble = ""
                log.info("nearkv: registered with the agent of node %s", message.node)
            elif isinstance(message, Refused):
                raise ProtocolError(f"refused, {message.reason}: {message.message}")
            self._on_message(message)
        return True

    def _forget_registration(self, agent_ended_it: bool) -> None:  # noqa: FBT001 (passed on)
        with self._lock:
            was_registered = self._registered is not None
            self._registered = None
            self._queue.clear()
        if was_registered:
            self._on_lost(agent_ended_it)
