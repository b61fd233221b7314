"""What every way of moving KV promises; one test suite runs against each of them.

A backend has two ends. The *server* is on the source's node and lets readers at the blocks
of granted leases. The *link* is on the target's node and pulls. All calls block and run on
threads of a mover, a process that can be killed at any time (DESIGN section 5).

The promises:

- ``Link.pull`` returns only when nobody writes into the target any more, however it ends.
- It returns normally only when every byte is there and was read under the lease: the fence
  was checked before the first and after the last byte was read at the source.
- It looks at ``stop`` at least once per chunk, and never waits beyond its deadline by more
  than a chunk takes.
- A reader gets no bytes but those of the blocks granted to it (one-sided RDMA excepted,
  where the hardware knows registered memory only).
- ``path`` says what is really used, found out, not assumed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.lease import SlotTable, check_fence


def monotonic_ms() -> int:
    """Return CLOCK_MONOTONIC in milliseconds, the clock of slots and deadlines."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What a link moves bytes over. ``name`` is a metric label: few values, no addresses.

    ``rdma`` is true only where the bytes bypass the kernel on a network adapter.
    ``detail`` is for people: the device, the transports a library chose, the reason.
    """

    name: str
    rdma: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Whether a backend can be used here, and why (not)."""

    name: str
    usable: bool
    rdma: bool = False
    detail: str = ""


@dataclass(slots=True)
class Region:
    """An engine's KV memory, mapped here. ``view`` covers all of ``layout.size`` bytes.

    A target's view is writable, a source's should not be.
    """

    view: memoryview
    layout: KvMemory


@dataclass(frozen=True, slots=True)
class Fence:
    """The promise that a reader depends on: this slot, open with this generation."""

    slot: int
    generation: int

    def check(self, slots: SlotTable) -> None:
        """Make sure that the promise holds now; raises ``LeaseError``."""
        check_fence(slots, self.slot, self.generation, now_ms=monotonic_ms())


@dataclass(slots=True)
class Source:
    """What a server gives access to: memory and the slots that fence it."""

    region: Region
    slots: SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One reader's permission: blocks ``block_ids`` under ``fence``, until ``expires_at_ms``.

    ``ticket`` is secret and names the grant: at least 16 random bytes.
    """

    ticket: bytes
    block_ids: tuple[int, ...]
    fence: Fence
    expires_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Which blocks to bring where: ``source_blocks[i]`` to ``target_blocks[i]``.

    The source blocks are ``block_ids[first_block:first_block + n]`` of the grant named by
    ``ticket``; ``source_layout`` says where they lie.
    """

    ticket: bytes
    first_block: int
    source_blocks: tuple[int, ...]
    source_layout: KvMemory
    target_blocks: tuple[int, ...]
    fence: Fence


@dataclass(slots=True)
class Stop:
    """Says whether a pull must end: its deadline, or somebody called :meth:`cancel`."""

    deadline_ms: int
    now_ms: Callable[[], int] = monotonic_ms
    cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Ask the pull to end at its next chunk; may be called from any thread."""
        self.cancelled = True

    def check(self) -> None:
        """Raise :class:`PullError` when it is time to end."""
        if self.cancelled:
            raise PullError(Reason.CANCELLED, "the pull was cancelled")
        if self.now_ms() >= self.deadline_ms:
            raise PullError(Reason.DEADLINE, "the pull's deadline has passed")

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least a millisecond: a timeout for waiting calls."""
        return max(0.001, (self.deadline_ms - self.now_ms()) / 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """How a pull went: bytes, the time they took, over what, in how many copies or messages."""

    size_bytes: int
    seconds: float
    path: Path
    pieces: int


class Server(Protocol):
    """The source's end of a backend, for one memory."""

    def offer(self, grant: Grant) -> bytes:
        """Admit a reader; returns what its link needs to connect (opaque, a few 100 bytes)."""
        ...

    def withdraw(self, ticket: bytes) -> None:
        """End a grant; unknown tickets are passed over."""
        ...

    def close(self) -> None:
        """Stop serving and let go of everything."""
        ...


class Link(Protocol):
    """The target's end: a way from one source to one target."""

    @property
    def path(self) -> Path:
        """What the bytes go over; final once a pull was made."""
        ...

    def pull(self, request: PullRequest, stop: Stop) -> PullReport:
        """Bring blocks; raises a ``TransferError`` with the reason when they do not count."""
        ...

    def close(self) -> None:
        """Let go of the connection; no writer is left when this returns."""
        ...


class Backend(Protocol):
    """One way of moving bytes. Constructing one loads nothing; ``probe`` and others may."""

    @property
    def name(self) -> str:
        """The name in settings and metrics."""
        ...

    def probe(self) -> Probe:
        """Say whether it can be used here; never raises."""
        ...

    def serve(self, source: Source) -> Server:
        """Start serving a memory; raises ``PullError`` (``NO_PATH``) where it cannot."""
        ...

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:
        """Connect to a server by an offer; raises ``PullError``."""
        ...
