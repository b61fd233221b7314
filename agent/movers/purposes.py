"""What a mover is for: its kind, the engine rank, and the library that it keeps to itself."""

from enum import StrEnum
from typing import NamedTuple

_ALONE = frozenset({"ucx", "nixl"})
"""Backends with a UCX of their own: two of them in one process disturb each other."""


class Kind(StrEnum):
    """What a mover does."""

    PULL = "pull"
    SERVE = "serve"
    PROBE = "probe"


class Purpose(NamedTuple):
    """There is one mover for each. ``key`` names the engine rank, or the backend of a probe.

    ``transport`` is set for backends that need a process of their own.
    """

    kind: Kind
    key: str
    transport: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """The purpose for the log."""
        labels = {"kind": self.kind.value, "key": self.key}
        return {**labels, "transport": self.transport} if self.transport else labels


def purpose_of(kind: Kind, key: str, backend: str) -> Purpose:
    """Return the purpose of a mover that uses a backend for an engine rank."""
    return Purpose(kind, key, backend if backend in _ALONE else "")
