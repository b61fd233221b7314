"""An engine's KV cache as vLLM keeps it: blocks in use, and free ones kept for reuse (pure).

Free blocks keep their content until somebody needs the room; the least recently used goes
first, and of one prompt its end before its beginning. A block's key names its whole prefix.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Claim:
    """The blocks that one request has: ``held`` by key, and ``unnamed`` ones.

    ``depth`` leading blocks were found; the others of ``keys`` get their names when they are
    computed.
    """

    keys: Sequence[int]
    depth: int
    unnamed: int
    held: list[int] = field(default_factory=list)


class BlockStore:
    """The blocks of one engine."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._unnamed = 0
        self._removed: list[int] = []

    @property
    def used_blocks(self) -> int:
        """Blocks that running requests have."""
        return len(self._users) + self._unnamed

    def depth_of(self, keys: Sequence[int], most: int) -> int:
        """Return how many leading blocks are here, ``most`` at most."""
        users, idle = self._users, self._idle
        depth = 0
        for key in keys:
            if depth >= most or (key not in users and key not in idle):
                break
            depth += 1
        return depth

    def claim(self, keys: Sequence[int], *, most_reused: int, blocks: int) -> Claim | None:
        """Take ``blocks`` for a request, those already here among them.

        Returns ``None``, and takes nothing, where there is no room now.
        """
        depth = self.depth_of(keys, most_reused)
        reused = keys[:depth]
        waking = sum(1 for key in reused if key not in self._users)
        needed = blocks - depth
        if self.used_blocks + waking + needed > self.capacity_blocks:
            return None
        for key in reused:
            self._idle.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
        self._evict_for(needed)
        self._unnamed += needed
        return Claim(keys, depth, needed, list(reused))

    def name(self, claim: Claim) -> list[int]:
        """Name the computed blocks of a prompt; returns the keys that were not here before."""
        stored: list[int] = []
        for key in claim.keys[claim.depth :]:
            if key in self._users:
                self._users[key] += 1
            else:
                if key not in self._idle:
                    stored.append(key)
                self._idle.pop(key, None)
                self._users[key] = 1
            claim.held.append(key)
            claim.unnamed -= 1
            self._unnamed -= 1
        return stored

    def release(self, claim: Claim) -> None:
        """Give a request's blocks back; named ones may be used again."""
        self._unnamed -= claim.unnamed
        claim.unnamed = 0
        for key in reversed(claim.held):
            users = self._users[key] - 1
            if users:
                self._users[key] = users
            else:
                del self._users[key]
                self._idle[key] = None
        claim.held.clear()

    def take_removed(self) -> list[int]:
        """Return the keys evicted since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def _evict_for(self, blocks: int) -> None:
        over = self.used_blocks + len(self._idle) + blocks - self.capacity_blocks
        for _ in range(over):
            key, _ = self._idle.popitem(last=False)
            self._removed.append(key)
