"""A proxy between a reader and a server that can do what networks do."""

import socket
import threading

import msgspec

from nearkv.transfer.backends.tcp_wire import Offer


class Proxy:
    """Forwards connections; spoils what the server sends at byte ``at`` of each connection.

    ``spoil`` is ``flip`` (a bit of that byte), ``cut`` (close instead of it) or ``hold`` (send
    nothing from there on, and keep the connection).
    """

    def __init__(self, offer: bytes, *, at: int, spoil: str, bit: int = 0) -> None:
        self._target = msgspec.msgpack.decode(offer, type=Offer)
        self._at, self._spoil, self._bit = at, spoil, bit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.offer = msgspec.msgpack.encode(
            msgspec.structs.replace(self._target, port=self._listener.getsockname()[1])
        )

    def close(self) -> None:
        """End everything."""
        for sock in [self._listener, *self._sockets]:
            shut(sock)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
                server = socket.create_connection((self._target.host, self._target.port))
            except OSError:
                return
            self._sockets += [reader, server]
            for pump in (self._ask, self._answer):
                thread = threading.Thread(target=pump, args=(reader, server))
                self._threads.append(thread)
                thread.start()

    def _ask(self, reader: socket.socket, server: socket.socket) -> None:
        try:
            while data := reader.recv(1 << 16):
                server.sendall(data)
        except OSError:
            pass
        shut(server)

    def _answer(self, reader: socket.socket, server: socket.socket) -> None:
        done = 0
        try:
            while data := server.recv(1 << 16):
                if not done <= self._at < done + len(data):
                    reader.sendall(data)
                elif self._spoil == "flip":
                    changed = bytearray(data)
                    changed[self._at - done] ^= 1 << self._bit
                    reader.sendall(changed)
                else:
                    reader.sendall(data[: self._at - done])
                    break
                done += len(data)
        except OSError:
            pass
        if self._spoil != "hold":
            shut(reader)


def shut(sock: socket.socket) -> None:
    """Wake whoever waits on a socket."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
