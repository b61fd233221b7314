"""The mover's own process: takes messages from the agent until told, or forced, to end."""

import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec

from nearkv.agent.movers.backends import Backends, Constructor
from nearkv.agent.movers.guarding import (
    KillTimer,
    die_with_parent,
    dump_no_memory,
    leave_signals_to_parent,
)
from nearkv.agent.movers.messages import (
    AddSource,
    AddTarget,
    AskStore,
    Cancel,
    Forget,
    MakeOffer,
    Pull,
    PutPrefix,
    Quit,
    Ready,
    RunProbe,
    Setup,
    ToMover,
    Withdraw,
)
from nearkv.agent.movers.pulling import Puller
from nearkv.agent.movers.serving import Servers
from nearkv.agent.movers.storing import Storer
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.framing import FrameReader, encode_frame, receive_with_fds

EXIT_DONE = 0
EXIT_CONFUSED = 70
"""The agent sent what cannot be read (``EX_SOFTWARE``)."""


def main(
    arguments: Sequence[str] | None = None,
    constructors: Mapping[str, Constructor] | None = None,
) -> None:
    """Run a mover; its one argument is the number of the control socket's descriptor.

    ``constructors`` adds backends to the built-in ones.
    """
    die_with_parent()
    leave_signals_to_parent()
    dump_no_memory()
    (fd,) = sys.argv[1:] if arguments is None else arguments
    Mover(socket.socket(fileno=int(fd)), Backends(constructors)).run()


class Mover:
    """Reads messages on the main thread; pulls and serving have threads of their own."""

    def __init__(self, sock: socket.socket, backends: Backends) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._backends = backends
        self._timer = KillTimer()
        self._puller: Puller | None = None
        self._servers: Servers | None = None
        self._storer: Storer | None = None
        self._setup = Setup(threads=1, max_links=0)

    def run(self) -> None:
        """Serve the agent; ends the process when the agent's end of the socket is closed.

        At once and with no clean-up: whatever is being copied must not be finished.
        """
        reader: FrameReader[ToMover] = FrameReader(ToMover)  # type: ignore[arg-type]  # a union
        self._send(Ready())
        while True:
            try:
                data, fds = receive_with_fds(self._sock)
                if not data:
                    os._exit(EXIT_DONE)
                for message, its_fds in reader.feed(data, fds):
                    self._handle(message, its_fds)
            except ConnectionError:
                os._exit(EXIT_DONE)
            except ProtocolError as error:
                print(f"nearkv mover: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the socket is no use any more
                os._exit(EXIT_CONFUSED)

    def _handle(self, message: ToMover, fds: list[int]) -> None:
        match message:
            case Setup():
                self._setup = message
                self._backends.configure(message.options)
            case AddSource():
                self._take_source(message, fds)
            case AddTarget() | Pull() | Cancel() | Forget():
                self._to_puller(message, fds)
            case MakeOffer() | Withdraw() | RunProbe():
                self._to_servers(message)
            case PutPrefix():
                self._storing().put(message)
            case AskStore():
                self._storing().ask(message)
            case Quit():
                self._quit(message.within_ms)

    def _to_puller(self, message: AddTarget | Pull | Cancel | Forget, fds: list[int]) -> None:
        match message:
            case AddTarget():
                self._pulling().add_target(message, fds)
            case Pull():
                self._pulling().pull(message)
            case Cancel():
                self._pulling().cancel(message.id)
            case Forget():
                self._pulling().forget(message)

    def _to_servers(self, message: MakeOffer | Withdraw | RunProbe) -> None:
        match message:
            case MakeOffer():
                self._serving().offer(message)
            case Withdraw():
                self._serving().withdraw(message.ticket)
            case RunProbe():
                self._serving().probe(message)

    def _take_source(self, message: AddSource, fds: list[int]) -> None:
        """Give a source to whom it is for: a mover stores, has a target, or serves."""
        if message.for_store:
            self._storing().add_source(message, fds)
        elif self._puller is not None:
            self._puller.add_source(message, fds)
        else:
            self._serving().add_source(message, fds)

    def _pulling(self) -> Puller:
        if self._puller is None:
            self._puller = Puller(
                self._backends,
                self._timer,
                self._send,
                threads=self._setup.threads,
                max_links=self._setup.max_links,
            )
        return self._puller

    def _serving(self) -> Servers:
        if self._servers is None:
            self._servers = Servers(self._backends, self._send)
        return self._servers

    def _storing(self) -> Storer:
        if self._storer is None:
            self._storer = Storer(self._backends, self._send)
        return self._storer

    def _quit(self, within_ms: int) -> None:
        self._timer.arm(monotonic_ms() + within_ms)
        if self._puller is not None:
            self._puller.close()
        if self._servers is not None:
            self._servers.close()
        os._exit(EXIT_DONE)

    def _send(self, message: msgspec.Struct) -> None:
        try:
            with self._sending:
                self._sock.sendall(encode_frame(message))
        except OSError:
            # The agent is gone, and so is the reason to be here.
            os._exit(EXIT_DONE)
