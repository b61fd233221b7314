"""A mover's process as the agent sees it: started, killed, reaped."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from nearkv.agent.movers.channel import Channel
from nearkv.agent.movers.messages import FromMover

MOVER_COMMAND = (sys.executable, "-P", "-m", "nearkv.agent.movers")
"""How a mover is started; the number of its control socket's descriptor comes behind."""
_STDERR = 2


class MoverProcess:
    """A running mover. It is killed as soon as its control socket breaks.

    Must be made on the event loop's thread, which must not end before the agent does: the
    kernel kills a mover when the *thread* that started it ends.
    ``on_exit`` is called once, with the return code as in ``subprocess``, when the process
    is gone and reaped: no thread of it runs any more. Raises ``OSError`` when it cannot be
    started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        on_message: Callable[[FromMover], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._popen = subprocess.Popen(  # noqa: S603 - the agent's own program
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    # Native libraries write to standard output, which is not theirs.
                    stdout=_STDERR,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            ours.close()
            raise
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._channel = Channel(ours, on_message=on_message, on_lost=self.kill)

    @property
    def pid(self) -> int:
        """The process id, in the agent's namespace."""
        return self._popen.pid

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message; see :meth:`Channel.send`."""
        self._channel.send(message, fds)

    def kill(self) -> None:
        """Kill it; nothing happens when it is gone. ``on_exit`` follows."""
        # Until it is reaped its number cannot be another's.
        self._popen.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        returncode = self._popen.poll()
        if returncode is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._channel.close()
        self._on_exit(returncode)
