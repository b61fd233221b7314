"""A mover with one more transport, whose pulls do what the ticket of their request says.

Run as a program, it is a real mover in all else. ``polite`` and ``stubborn`` write into the
target's first block for ever, byte by byte, so that a test sees whether somebody still writes;
the stubborn one does not look at ``stop``.
"""

import os
import signal
import sys
import threading
import time

from nearkv.agent.movers.program import main
from nearkv.transfer.backends.contract import Path, Probe, PullReport
from nearkv.transfer.errors import PullError, Reason

WRITTEN = slice(0, 64)


def scribble(view, stop=None):
    count = 0
    while True:
        if stop is not None:
            stop.check()
            time.sleep(0.0005)  # leaves the other threads, and machines with few cores, some time
        count = count % 255 + 1
        for place in range(WRITTEN.start, WRITTEN.stop):
            view[place] = count


def hog_the_interpreter(view):
    """Never let another thread of this process run, as native code may that keeps the GIL."""
    sys.setswitchinterval(1e6)
    scribble(view)


class ScribblingLink:
    """Counts its pulls: a link that is used again says so in its report."""

    def __init__(self, target, offer=b""):
        self._target = target
        self._offer = offer
        self._pulls = 0

    @property
    def path(self):
        return Path(name="scribble")

    def pull(self, request, stop):
        self._pulls += 1
        what = request.ticket.split(b":")[0].decode()
        view = self._target.view
        match what:
            case "polite":
                scribble(view, stop)
            case "stubborn":
                scribble(view)
            case "hogging":
                hog_the_interpreter(view)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fails":
                raise ZeroDivisionError("not by us")
            case "peer_lost_once" if self._pulls > 1:
                raise PullError(Reason.PEER_LOST, "the peer closed the connection")
            case "hoards":
                HOARD.append(self)
            case "thread":
                threading.Thread(target=scribble, args=(view,), daemon=True).start()
        return PullReport(size_bytes=0, seconds=0.0, path=self.path, pieces=self._pulls)

    def close(self):
        pass


HOARD = []


class KeepingLink(ScribblingLink):
    """Holds on to the source's memory, come what may."""

    def __init__(self, source, target):
        super().__init__(target)
        self._source = source
        self._kept = memoryview(source.region.view)


class ScribblingServer:
    def __init__(self, source, prefix):
        self._source = source
        self._prefix = prefix

    def offer(self, grant):
        if grant.ticket.startswith(b"hangs"):
            time.sleep(3600)
        if grant.ticket.startswith(b"fails"):
            raise ZeroDivisionError("not by us")
        return self._prefix + grant.ticket

    def withdraw(self, ticket):
        pass

    def close(self):
        pass


class ScribblingBackend:
    name = "scribble"

    def __init__(self, prefix="offer "):
        self._prefix = prefix.encode()

    def probe(self):
        return Probe(name=self.name, usable=True, detail=f"in process {os.getpid()}")

    def serve(self, source):
        return ScribblingServer(source, self._prefix)

    def link(self, source, target):
        return KeepingLink(source, target)

    def connect(self, offer, target, stop):  # noqa: ARG002 - the contract's signature
        return ScribblingLink(target, offer)


class DyingBackend(ScribblingBackend):
    name = "dying"

    def probe(self):
        os.abort()


class RaisingBackend(ScribblingBackend):
    name = "raising"

    def probe(self):
        raise ImportError("its library is missing")


if __name__ == "__main__":
    main(
        constructors={
            "scribble": ScribblingBackend,
            "dying": DyingBackend,
            "raising": RaisingBackend,
        }
    )
