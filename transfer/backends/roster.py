"""The connections that a server of pulls attends to, each on a thread of its own."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Wire(Protocol):
    """What a reader is spoken to by."""

    def abort(self) -> None:
        """End it at once, from any thread."""


W = TypeVar("W", bound=Wire)


@dataclass(slots=True, eq=False)
class Connection(Generic[W]):
    """A reader's connection; ``waiting_since`` is 0 while a pull is served."""

    wire: W
    waiting_since: float
    thread: threading.Thread | None = field(default=None)
    leaving: bool = field(default=False)


class Roster(Generic[W]):
    """At most ``most`` connections, until ``closing`` is set.

    When all places are taken, the connection that has waited longest makes room. ``attend`` runs
    on the connection's thread and ends with :meth:`leave`.
    """

    def __init__(
        self,
        most: int,
        closing: threading.Event,
        attend: Callable[[Connection[W]], None],
        *,
        thread_name: str,
    ) -> None:
        self._most = most
        self._closing = closing
        self._attend = attend
        self._thread_name = thread_name
        self._connections: set[Connection[W]] = set()
        self._lock = threading.Lock()

    def admit(self, wire: W) -> bool:
        """Give a connection its thread; False where there is no place, or no thread, for it."""
        connection = Connection(wire, time.monotonic())
        with self._lock:
            return not self._closing.is_set() and self._make_room() and self._begin(connection)

    def leave(self, connection: Connection[W]) -> None:
        """Give up a connection's place."""
        with self._lock:
            self._connections.discard(connection)

    def close(self) -> Sequence[Connection[W]]:
        """Set ``closing`` and return the connections: they are to be aborted, then joined."""
        with self._lock:
            self._closing.set()
            return list(self._connections)

    def _make_room(self) -> bool:
        staying = [held for held in self._connections if not held.leaving]
        if len(staying) < self._most:
            return True
        waiting = [held for held in staying if held.waiting_since]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda held: held.waiting_since)
        oldest.leaving = True
        oldest.wire.abort()
        return True

    def _begin(self, connection: Connection[W]) -> bool:
        """Begin to attend; False where the system has no more threads for us."""
        thread = threading.Thread(
            target=self._attend, args=(connection,), name=self._thread_name, daemon=True
        )
        self._connections.add(connection)
        try:
            thread.start()
        except RuntimeError:
            self._connections.discard(connection)
            return False
        connection.thread = thread
        return True


def join_all(connections: Sequence[Connection[W]]) -> None:
    """Wait until none of these is attended to any more."""
    for connection in connections:
        if connection.thread is not None:
            connection.thread.join()
