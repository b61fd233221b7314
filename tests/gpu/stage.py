"""Players as the check sees them: started, asked, killed, and always ended."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.gpu.results import SkippedError, WrongError
from tests.gpu.wire import ClosedError, close_fds, receive, send

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 90.0
_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


class Peer(Protocol):
    """A player in some process."""

    def ask(self, command: str, fds: Sequence[int] = (), **fields: object) -> dict[str, Any]:
        """Have it do something; raises ``WrongError`` or ``SkippedError``. Keeps ``fds``.

        Descriptors of the answer are in ``fds``, the caller's to close.
        """
        ...

    def kill(self) -> None:
        """End it at once, as SIGKILL does; returns when it is gone."""
        ...


class Stage(Protocol):
    """Starts players, and knows what checks may use."""

    def player(self, kind: str = "plain", *, isolated: bool = False) -> Any:
        """Return a context that has a player run; ``isolated`` in a PID namespace of its own."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessStage:
    """Players in processes of their own. ``engine_python`` is an interpreter with torch."""

    ordinal: int = 0
    engine_python: str = sys.executable

    @contextmanager
    def player(self, kind: str = "plain", *, isolated: bool = False) -> Iterator["ProcessPeer"]:
        """Start a process, end it with the block."""
        python = self.engine_python if kind == "torch" else sys.executable
        prefix = isolation() if isolated else ()
        peer = ProcessPeer((*prefix, python, "-m", "tests.gpu.roles", kind), self.ordinal)
        try:
            yield peer
        finally:
            peer.close()


class ProcessPeer:
    """A player's process and the connection with it."""

    def __init__(self, command: Sequence[str], ordinal: int) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        self._sock.settimeout(ANSWER_SECONDS)
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        with theirs:
            self._process = subprocess.Popen(
                (*command, str(theirs.fileno()), str(ordinal)),
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": paths},
            )

    def ask(self, command: str, fds: Sequence[int] = (), **fields: object) -> dict[str, Any]:
        """Have it do something; see :class:`Peer`."""
        try:
            send(self._sock, {"command": command, **fields}, fds)
            answer, answer_fds = receive(self._sock)
        except ClosedError as error:
            raise WrongError(f"{command}: the process is gone or silent: {error}") from error
        return checked(answer, answer_fds)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process, gently while it listens."""
        self._sock.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self.kill()


def checked(answer: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Return an answer with its descriptors; raises what it says went wrong."""
    if "skipped" in answer or "error" in answer:
        close_fds(fds)
        if "skipped" in answer:
            raise SkippedError(str(answer["skipped"]))
        raise WrongError(str(answer["error"]))
    return {**answer, "fds": fds}


def isolation() -> tuple[str, ...]:
    """Return the command that gives a process PIDs of its own; raises ``SkippedError``."""
    if shutil.which(_UNSHARE[0]) is None:
        raise SkippedError("unshare is not installed")
    tried = subprocess.run((*_UNSHARE, "true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        raise SkippedError(f"PID namespaces are not allowed here: {tried.stderr.strip()}")
    return _UNSHARE
