"""The process that reads GPUs, as the agent sees it: started, asked, ended, reaped."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from nearkv.agent.gpu.errors import (
    GpuError,
    ReaderEndedError,
    ReaderFailedError,
    ReaderStuckError,
)
from nearkv.agent.gpu.mark import NO_DEVICE, Mark, MarkedCall, create_mark_file
from nearkv.agent.gpu.messages import Failed, FromReader, Look, Open, Opened, Quit
from nearkv.agent.gpu.model import Reading, Xid
from nearkv.agent.gpu.reasons import Reason
from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.framing import FrameReader, encode_frame

READER_COMMAND = (sys.executable, "-P", "-m", "nearkv.agent.gpu")
"""How it is started; the numbers of two descriptors come behind."""
_STDERR = 2
_SLOW_CALLS = ("nvmlInit", "nvmlShutdown")
_NS = 1e9


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Deadlines in seconds: of NVML's start, of any other call, of a whole look, of the end."""

    open_seconds: float = 60.0
    call_seconds: float = 5.0
    look_seconds: float = 30.0
    quit_seconds: float = 3.0
    reap_seconds: float = 5.0

    def of_call(self, call: str) -> float:
        """Return how long a call may take."""
        return self.open_seconds if call in _SLOW_CALLS else self.call_seconds


class ReaderProcess:
    """A running process. Make it on the event loop's thread, which must outlive it.

    (The kernel kills the process when the thread that started it ends.) Raises ``OSError``
    when it cannot be started. ``on_xid`` is called on the loop for every Xid.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = READER_COMMAND,
        environment: Mapping[str, str] | None = None,
        limits: ReaderLimits,
        on_xid: Callable[[Xid], object],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._on_xid = on_xid
        self._answer: asyncio.Future[Reading | Opened] | None = None
        self._reader: FrameReader[FromReader] = FrameReader(FromReader)  # type: ignore[arg-type]  # a union
        self._stopping = False
        self.reaped = asyncio.Event()
        mark_fd = create_mark_file()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._popen = subprocess.Popen(  # noqa: S603 (the agent's own program)
                    [*command, str(theirs.fileno()), str(mark_fd)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,  # native libraries write there, which is not theirs
                    pass_fds=(theirs.fileno(), mark_fd),
                )
            self._mark = Mark(mark_fd)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(mark_fd)
        ours.setblocking(False)  # noqa: FBT003 (the standard library's signature)
        self._sock = ours
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._loop.add_reader(ours.fileno(), self._receive)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    async def open(self, opening: Open) -> None:
        """Open NVML; raises what :meth:`look` does, and :class:`ReaderFailedError`."""
        limit = self._limits.open_seconds + self._limits.look_seconds
        await self._ask(opening, limit)

    async def look(self, *, thorough: bool) -> Reading:
        """Return a reading; raises :class:`ReaderStuckError` or :class:`ReaderEndedError`.

        After either the process is of no use any more.
        """
        answer = await self._ask(Look(thorough), self._limits.look_seconds)
        if not isinstance(answer, Reading):
            raise ReaderEndedError("the reader answered something else")
        return answer

    async def stop(self) -> bool:
        """End it, gently if it listens; False when the kernel does not let it go."""
        if not self.reaped.is_set():
            self._stopping = True
            self._send(Quit())
            if not await self._gone_within(self._limits.quit_seconds):
                self.kill()
        return await self._gone_within(self._limits.reap_seconds)

    def kill(self) -> None:
        """End it at once; nothing happens when it is gone."""
        self._popen.send_signal(signal.SIGKILL)

    async def _gone_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.reaped.wait()
        except TimeoutError:
            return False
        return True

    async def _ask(self, message: msgspec.Struct, limit_seconds: float) -> Reading | Opened:
        self._answer = self._loop.create_future()
        answer = self._answer
        self._send(message)
        end = time.monotonic() + limit_seconds
        pause = min(0.5, self._limits.call_seconds / 4)
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=pause)
                if done:
                    return answer.result()
                call = self._mark.current()
                now = time.monotonic()
                if now > end or (call is not None and self._is_overdue(call, now)):
                    raise self._end_of(Reason.HUNG, call)
        finally:
            self._answer = None

    def _is_overdue(self, call: MarkedCall, now: float) -> bool:
        return now - call.started_ns / _NS > self._limits.of_call(call.call)

    def _send(self, message: msgspec.Struct) -> None:
        if self.reaped.is_set():
            self._settle(ReaderEndedError("the reader has ended"))
            return
        try:
            self._sock.send(encode_frame(message))
        except OSError as error:  # a few bytes always have room: it is gone, or does not read
            told = self._stopping
            self._settle(ReaderEndedError(f"the reader does not listen: {error}", as_told=told))

    def _receive(self) -> None:
        try:
            data = self._sock.recv(1 << 20)
            messages = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            data, messages = b"", []
        if not data:
            # Why it ended is known when it is reaped.
            self._loop.remove_reader(self._sock.fileno())
            self.kill()
            return
        for message, _ in messages:
            self._take(message)

    def _take(self, message: FromReader) -> None:
        if isinstance(message, Xid):
            self._on_xid(message)
        elif isinstance(message, Failed):
            self._settle(ReaderFailedError(message.missing))
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _settle(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _reap(self) -> None:
        returncode = self._popen.poll()
        if returncode is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._loop.remove_reader(self._sock.fileno())
        self._drain()
        self._sock.close()
        call = self._mark.current()
        self._mark.close()
        self.reaped.set()
        if call is None:
            told = self._stopping
            self._settle(ReaderEndedError(f"the reader ended with {returncode}", as_told=told))
        else:
            self._settle(self._end_of(Reason.CRASHED, call))

    def _end_of(self, reason: Reason, call: MarkedCall | None) -> GpuError:
        """Return what it means that a call does not come back: nothing, if it was told to end."""
        if self._stopping:
            return ReaderEndedError("the reader was told to end", as_told=True)
        if call is None:
            return ReaderStuckError(reason, device_index=NO_DEVICE, call="")
        return ReaderStuckError(reason, device_index=call.device_index, call=call.call)

    def _drain(self) -> None:
        """Take what it said last: why NVML could not be opened comes just before the end."""
        try:
            while data := self._sock.recv(1 << 20):
                for message, _ in self._reader.feed(data):
                    self._take(message)
        except (OSError, ProtocolError):
            return
