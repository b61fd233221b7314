"""What a mover is for: its kind, the engine rank, and the library that it keeps to itself."""

from enum import StrEnum
from typing import NamedTuple

_ALONE = frozenset({"ucx", "nixl", "store"})
"""Backends that keep a process to themselves.

Two that have a UCX of their own disturb each other in one process; a store that hangs must
take no pull between engines with it.
"""


class Kind(StrEnum):
    """What a mover does."""

    PULL = "pull"
    SERVE = "serve"
    PROBE = "probe"
    STORE = "store"
    """Puts an engine rank's blocks into the store; without a key, asks what is there."""


class Purpose(NamedTuple):
    """There is one mover for each. ``key`` names the engine rank, or the backend of a probe.

    The mover that asks the store on behalf of all engines has no key. It stays when it is
    idle: a request that asks must not wait for its start.
    ``transport`` is set for backends that need a process of their own.
    """

    kind: Kind
    key: str
    transport: str = ""

    @property
    def stays(self) -> bool:
        """Whether its mover is kept when it has nothing to do."""
        return self.kind is Kind.STORE and not self.key

    @property
    def labels(self) -> dict[str, str]:
        """The purpose for the log."""
        labels = {"kind": self.kind.value, "key": self.key}
        return {**labels, "transport": self.transport} if self.transport else labels


def purpose_of(kind: Kind, key: str, backend: str) -> Purpose:
    """Return the purpose of a mover that uses a backend for an engine rank."""
    return Purpose(kind, key, backend if backend in _ALONE else "")
