"""The process that reads GPUs: opens NVML, answers each request with a reading.

It has nothing but NVML in it. When it ends, by itself or by SIGKILL, every file of the driver
that it held is closed, and the next one loads the driver's library anew (docs/adr/0011).
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nearkv.agent.gpu.calling import Calls, Library
from nearkv.agent.gpu.errors import NvmlError
from nearkv.agent.gpu.mark import Mark
from nearkv.agent.gpu.messages import Failed, Look, Open, Opened, Quit, ToReader
from nearkv.agent.gpu.model import Reading
from nearkv.agent.gpu.nvml import load_nvml
from nearkv.agent.gpu.session import Session
from nearkv.agent.gpu.xid_events import XidEvents
from nearkv.agent.movers.guarding import die_with_parent, leave_signals_to_parent
from nearkv.transfer.errors import ProtocolError
from nearkv.transfer.framing import FrameReader, encode_frame

EXIT_DONE = 0
EXIT_CONFUSED = 70
"""The agent sent what cannot be read (``EX_SOFTWARE``)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it; arguments are the descriptors of the control socket and of the mark."""
    die_with_parent()
    leave_signals_to_parent()
    # Sent to the agent's whole group it would end this process before NVML is closed.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    control, mark = (int(text) for text in (sys.argv[1:] if arguments is None else arguments))
    Program(socket.socket(fileno=control), Mark(mark)).run()


class Program:
    """Serves the agent until it says so, or is gone."""

    def __init__(self, sock: socket.socket, mark: Mark) -> None:
        self._sock = sock
        self._mark = mark
        self._sending = threading.Lock()
        self._reader: FrameReader[ToReader] = FrameReader(ToReader)  # type: ignore[arg-type]  # a union

    def run(self) -> None:
        """Do what the agent asks for, then end the process."""
        try:
            opening = self._receive()
            if isinstance(opening, Open):
                self._serve(opening)
        except ConnectionError:
            pass  # the agent is gone, and so is the reason to be here
        except ProtocolError as error:
            print(f"nearkv gpu reader: {error}", file=sys.stderr, flush=True)  # noqa: T201 (the socket is no use any more)
            os._exit(EXIT_CONFUSED)
        # No clean-up by Python: a thread may be inside a call that never returns.
        os._exit(EXIT_DONE)

    def _serve(self, opening: Open) -> None:
        try:
            library = load_nvml()
            calls = Calls(library, self._mark, opening.left_out)
            session = Session(calls, Path(opening.sysfs))
            session.open()
        except NvmlError as error:
            self._send(Failed(error.missing))
            return
        self._send(Opened())
        events = self._start_events(library, calls, session)
        while isinstance(request := self._receive(), Look):
            reading = session.read(thorough=request.thorough)
            self._send(_with_events(reading, events))
        if isinstance(request, Quit) and events.stop():
            session.close()

    def _start_events(self, library: Library, calls: Calls, session: Session) -> XidEvents:
        events = XidEvents(library, calls, self._send)
        handles = session.handles
        events.start(
            (device, handles[device.index]) for device in session.devices if device.index in handles
        )
        return events

    def _receive(self) -> ToReader:
        while True:
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the agent closed the socket")
            for message, _ in self._reader.feed(data):
                return message  # the agent waits for an answer before it sends another

    def _send(self, message: msgspec.Struct) -> None:
        with self._sending:
            self._sock.sendall(encode_frame(message))


def _with_events(reading: Reading, events: XidEvents) -> Reading:
    return msgspec.structs.replace(reading, events=events.missing)
