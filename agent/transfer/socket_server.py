"""The Unix socket that engines connect to: a path, its rights, its one owner.

A pathname and not an abstract name: abstract names do not cross network namespaces, which
pods have of their own.
"""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import structlog

from nearkv.errors import ListenError

SOCKET_NAME = "agent.sock"
_DIRECTORY_MODE = 0o770
_SOCKET_MODE = 0o660
_BACKLOG = 128
_ACCEPTS_PER_TURN = 16
_PAUSE_SECONDS = 0.5
_MAX_PATH_BYTES = 107

log = structlog.get_logger(__name__)


class SocketServer:
    """Listens at ``<directory>/agent.sock`` and hands each connection to ``on_connection``."""

    def __init__(self, directory: Path, on_connection: Callable[[socket.socket], None]) -> None:
        self.path = directory / SOCKET_NAME
        self._on_connection = on_connection
        self._sock: socket.socket | None = None
        self._identity: tuple[int, int] | None = None
        self._resume: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to listen; raises :class:`ListenError` when another agent does, or it cannot."""
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise ListenError(f"cannot listen on {self.path}: the path is too long")
        try:
            self.path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            _make_way(self.path)
            self._sock = _listening_socket(self.path)
            status = self.path.stat()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ListenError(f"cannot listen on {self.path}: {reason}") from error
        self._identity = (status.st_dev, status.st_ino)
        self._listen_on()

    def stop_accepting(self) -> None:
        """Take no more connections, and remove the socket unless it is another's by now."""
        if self._sock is None:
            return
        if self._resume is not None:
            self._resume.cancel()
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        with contextlib.suppress(OSError):
            status = self.path.stat()
            if (status.st_dev, status.st_ino) == self._identity:
                self.path.unlink()

    def _listen_on(self) -> None:
        self._resume = None
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._sock is None:
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: the listening socket stays readable, so look away a while.
                log.warning("cannot_accept_engines", error=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock.fileno())
                self._resume = loop.call_later(_PAUSE_SECONDS, self._listen_on)
                return
            self._on_connection(sock)


def _listening_socket(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(0)
        sock.bind(str(path))
        # Before it listens nobody can connect, so the rights are there in time.
        path.chmod(_SOCKET_MODE)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _make_way(path: Path) -> None:
    """Remove a socket that nobody listens on; raises :class:`ListenError` for anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on {path}: a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(0)
        code = sock.connect_ex(str(path))
    if code in (0, errno.EAGAIN):  # EAGAIN: somebody listens, with a full queue
        raise ListenError(f"cannot listen on {path}: another agent listens there")
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise OSError(code, os.strerror(code))
    path.unlink(missing_ok=True)
