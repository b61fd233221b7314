"""What a place for stored packets promises; one test suite runs against each of them.

A *tier* keeps values of bytes under keys and knows nothing of KV. What comes out of it is
verified by ``packing``, so a tier may lose values, and even damage them, at any time.

The promises:

- A value is there as a whole or not at all, whoever else writes at the same time.
- Nothing is read or sent before its size was compared with a limit.
- Calls end by the deadline of ``stop`` and name a reason in a ``PullError``: ``STORE_FULL``,
  ``TOO_LARGE``, ``NO_PATH``, ``PEER_LOST``, ``PEER_REFUSED``, ``BUSY``, ``DEADLINE``,
  ``CANCELLED``. A tier's documentation says by how much a call may outlast the deadline.
- All of it may be called from several threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nearkv.transfer.backends.contract import Stop
from nearkv.transfer.errors import Reason

Bytes = bytes | bytearray | memoryview


class Tier(Protocol):
    """A place for values."""

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        ...

    @property
    def max_value_bytes(self) -> int:
        """The largest value that is taken."""
        ...

    def present(self, keys: Sequence[str], stop: Stop) -> list[bool]:
        """Say of each key whether it has a value."""
        ...

    def touch(self, key: str, stop: Stop) -> bool:
        """Say whether a key has a value; one that has is kept as if it were written now."""
        ...

    def get(self, key: str, limit_bytes: int, stop: Stop) -> Bytes | None:
        """Return a value; ``TOO_LARGE`` when it is longer than ``limit_bytes``."""
        ...

    def put(self, key: str, parts: Sequence[Bytes], stop: Stop) -> None:
        """Keep a value, made of parts back to back; ``STORE_FULL`` where there is no room."""
        ...

    def remove(self, key: str, stop: Stop) -> None:
        """Drop a value; one that is not there is passed over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """What a request is made of, as far as whole blocks go.

    ``token_ids`` are the request's own tokens, packed little-endian u32, at least those of all
    blocks; ``block_keys`` the chain of keys (``nearkv.block_keys``), one per block. A salt is
    never stored, only a digest of it.
    """

    token_ids: bytes
    block_keys: tuple[int, ...]
    cache_salt: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """How a put or a pull went.

    ``blocks`` leading blocks of the prefix are good: stored after a put, in the target after a
    pull (those skipped included). ``reason`` is ``None`` when that is all of them, otherwise
    why it ended there: ``NOT_STORED`` where a store has no more of the prefix.
    ``segments`` were moved, with ``size_bytes`` of KV; segments that a put found in the store
    are not moved.
    """

    blocks: int
    segments: int
    size_bytes: int
    seconds: float
    reason: Reason | None = None
    detail: str = ""
