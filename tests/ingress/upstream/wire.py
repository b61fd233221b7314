"""A transport that notes what is done with it, for feeding a connection byte by byte."""

import asyncio

from nearkv.ingress.upstream.connection import EngineConnection


class Wire(asyncio.Transport):
    """One connection; :meth:`arrive` is the engine's side of it."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.unsent_bytes = 0
        self.is_paused = self.is_aborted = False
        self.freed = []
        self.lost = []
        self.connection = EngineConnection(self.freed.append, self.lost.append)
        self.connection.connection_made(self)

    def ask(self, method="POST"):
        return self.connection.send(method, b"head|", b"body")

    def arrive(self, *parts):
        for part in parts:
            if not self.is_aborted:
                self.connection.data_received(part)

    def hang_up(self, error=None):
        self.is_aborted = True
        self.connection.connection_lost(error)

    # -- What the connection does with it ----------------------------------------------

    def write(self, data):
        self.written += data

    def get_write_buffer_size(self):
        return self.unsent_bytes

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True

    def pause_reading(self):
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self):
        assert self.is_paused
        self.is_paused = False
