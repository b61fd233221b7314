"""Snapshots of the state that several consumers read at once.

After an agent's start, or a busy moment, all consumers want a snapshot together. Each of its own
would take the memory and the time of all keys again; so one that was begun is shared as long as
the deltas behind it are sure to be kept until its readers are through.
"""

from collections.abc import Callable, Iterator
from weakref import WeakSet

from nearkv.agent.errors import SnapshotBusyError
from nearkv.state.model import Cursor

_MOST_AT_ONCE = 4
_REUSE_SHARE_OF_RING = 4


class SharedSnapshot:
    """The frames of one moment, made once and as they are first read."""

    def __init__(self, cursor: Cursor, frames: Iterator[bytes], *, sealed_bytes: int) -> None:
        self.cursor = cursor
        self.sealed_bytes = sealed_bytes
        self._source = frames
        self._made: list[bytes] = []

    def frames(self) -> Iterator[bytes]:
        """Yield all frames, to each reader anew."""
        at = 0
        while True:
            if at == len(self._made):
                frame = next(self._source, None)
                if frame is None:
                    return
                self._made.append(frame)
            yield self._made[at]
            at += 1


class Snapshots:
    """Gives out snapshots: a shared one where it serves, and not too many different ones."""

    def __init__(self, make: Callable[[], SharedSnapshot], *, ring_limit_bytes: int) -> None:
        self._make = make
        self._reuse_bytes = ring_limit_bytes // _REUSE_SHARE_OF_RING
        self._alive: WeakSet[SharedSnapshot] = WeakSet()

    @property
    def alive(self) -> int:
        """How many different ones are being read."""
        return len(self._alive)

    def get(self, sealed_bytes: int, *, is_known: Callable[[Cursor], bool]) -> SharedSnapshot:
        """Return a snapshot that deltas can be added to.

        ``sealed_bytes`` counts all deltas so far, ``is_known`` tells whether a cursor can be
        gone on from. Raises :class:`SnapshotBusyError` when too many are being read.
        """
        for snapshot in self._alive:
            behind_bytes = sealed_bytes - snapshot.sealed_bytes
            if behind_bytes <= self._reuse_bytes and is_known(snapshot.cursor):
                return snapshot
        if len(self._alive) >= _MOST_AT_ONCE:
            raise SnapshotBusyError(f"{_MOST_AT_ONCE} snapshots are being read")
        snapshot = self._make()
        self._alive.add(snapshot)
        return snapshot
