"""An agent on a real Unix socket that does nothing by itself, for the connector's tests."""

import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from nearkv.transfer.framing import FrameReader, encode_frame, receive_with_fds
from nearkv.transfer.messages import FromEngine, Registered

WAIT_SECONDS = 30.0


class QuietAgent:
    """Listens, takes registrations, and notes what it is told; tests say the rest.

    The connection's socket is blocking and used from the test's thread only.
    """

    def __init__(self, path):
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(WAIT_SECONDS)
        self.connection = None
        self.fds = []

    def accept(self):
        """Take the next connection; return its first message."""
        if self.connection is not None:
            self.connection.close()
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(WAIT_SECONDS)
        self._reader = FrameReader(FromEngine)
        self._messages = []
        return self.next()

    def register(self, **fields):
        """Take the next connection and its registration; returns the registration."""
        hello = self.accept()
        self.say(Registered(**{"node": "n1", "agent": "http://127.0.0.1:1", "boot": "b", **fields}))
        return hello

    def next(self):
        """Return the next message."""
        while not self._messages:
            data, fds = receive_with_fds(self.connection)
            assert data, "the connection ended"
            for message, taken in self._reader.feed(data, fds):
                self._messages.append(message)
                self.fds.extend(taken)
        return self._messages.pop(0)

    def say(self, message):
        """Send a message."""
        self.connection.sendall(encode_frame(message))

    def hang_up(self):
        """End the connection; the listener stays."""
        self.connection.close()
        self.connection = None

    def close(self):
        """End everything."""
        if self.connection is not None:
            self.connection.close()
        self._listener.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def agent_path():
    """A place for a socket whose path is short enough."""
    with tempfile.TemporaryDirectory(prefix="nk-") as folder:
        yield Path(folder) / "agent.sock"


@pytest.fixture
def agent(agent_path):
    """An agent that listens."""
    agent = QuietAgent(agent_path)
    yield agent
    agent.close()


@pytest.fixture
def eventually():
    """Wait until something other threads bring about is true."""

    def wait(condition):
        done = threading.Event()
        for _ in range(int(WAIT_SECONDS * 200)):
            if condition():
                return
            done.wait(0.005)
        raise AssertionError("it did not come true")

    return wait
