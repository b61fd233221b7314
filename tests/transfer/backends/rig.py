"""A source, its server and a target, for one backend: what contract tests work with."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from nearkv.transfer.backends.contract import (
    Fence,
    Grant,
    Link,
    PullReport,
    PullRequest,
    Server,
    Source,
    Stop,
    monotonic_ms,
)
from nearkv.transfer.errors import Reason, TransferError
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.lease import SLOT_BYTES, Slot, SlotTable
from nearkv.transfer.memory import create_memory, create_slots, open_memory, open_region
from tests.transfer.backends.kinds import SLOW_PULL_BYTES, Kind

PATIENCE_MS = 30_000
UNTOUCHED = 0xEE
"""What a target is filled with before a pull."""


def layout(
    *, layers=2, blocks=16, block_bytes=512, interleaved=False, offset=0, gap_bytes=0
) -> KvMemory:
    """Return a layout; ``gap_bytes`` lie between blocks, and between layers as well."""
    if interleaved:
        layer_stride = block_bytes + gap_bytes
        block_stride = layer_stride * layers
        size = offset + block_stride * blocks
    else:
        block_stride = block_bytes + gap_bytes
        layer_stride = block_stride * blocks + gap_bytes
        size = offset + layer_stride * layers
    return KvMemory(
        size=size, layers=layers, blocks=blocks, layer_stride=layer_stride,
        block_stride=block_stride, block_bytes=block_bytes, offset=offset,
    )  # fmt: skip


def slow_layout() -> KvMemory:
    """A pull of all of its blocks goes through no buffer at once, on whatever path."""
    return layout(layers=2, blocks=SLOW_PULL_BYTES // 2 // 32768, block_bytes=32768)


@dataclass(slots=True)
class HookedStop(Stop):
    """Calls ``hook`` once, at the ``nth`` look that a pull takes at it.

    Pulls look once per chunk, so the hook runs in the middle of a pull without a sleep.
    """

    hook: Callable[[], None] = lambda: None
    nth: int = 4
    looks: int = field(default=0, init=False)

    def check(self) -> None:
        """Count, perhaps call the hook, then do what a stop does."""
        self.looks += 1
        if self.looks == self.nth:
            self.hook()
        Stop.check(self)


class WatchedSlots(SlotTable):
    """The server's slots; ``hook`` is called once, after the ``nth`` look at one."""

    def __init__(self, memory) -> None:
        super().__init__(memory)
        self.hook: Callable[[], None] = lambda: None
        self.nth = 0
        self.looks = 0

    def read(self, index: int) -> Slot:
        """Read, then perhaps call the hook."""
        slot = super().read(index)
        self.looks += 1
        if self.looks == self.nth:
            self.hook()
        return slot


def usable(kind: Kind) -> Kind:
    """Return a kind; skips the test where it cannot run."""
    if reason := kind.missing():
        pytest.skip(reason)
    return kind


def reason_of(call: Callable[[], object]) -> Reason:
    """Return why a call fails; it must."""
    with pytest.raises(TransferError) as caught:
        call()
    return caught.value.reason


def patient() -> Stop:
    """Return a stop that no test should run into."""
    return Stop(deadline_ms=monotonic_ms() + PATIENCE_MS)


class Rig:
    """Memory with known bytes, its server, and a target of another layout.

    ``source_bytes`` and ``target_bytes`` are arrays over the memories, for looking and changing.
    """

    def __init__(self, kind, source_layout: KvMemory, target_layout: KvMemory | None = None):
        self.kind = kind
        self.backend = kind.make()
        self._memories = [
            create_memory(source_layout.size),
            create_memory((target_layout or source_layout).size),
            create_slots(8),
        ]
        source_memory, target_memory, slots_memory = self._memories
        self.source_bytes = np.frombuffer(source_memory.view, np.uint8)
        self.source_bytes[:] = np.random.default_rng(7).integers(
            0, 256, source_layout.size, dtype=np.uint8
        )
        self.target_bytes = np.frombuffer(target_memory.view, np.uint8)
        self.target_bytes[:] = UNTOUCHED
        self.engine_slots = SlotTable(slots_memory.view)
        self.source = Source(
            open_region(source_memory.fd, source_layout, writable=False),
            WatchedSlots(open_memory(slots_memory.fd, 8 * SLOT_BYTES, writable=False)),
        )
        self.target = open_region(target_memory.fd, target_layout or source_layout, writable=True)
        self.server: Server | None = None if kind.handed_over else self.backend.serve(self.source)
        self._offers: dict[bytes, bytes] = {}
        self._links: list[Link] = []

    def grant(self, blocks: Sequence[int], *, slot=0, ttl_ms=PATIENCE_MS, grant_ms=None) -> Grant:
        """Open a slot and let a reader at blocks; the grant itself holds for ``grant_ms``."""
        expires_at_ms = monotonic_ms() + ttl_ms
        generation = self.engine_slots.open(slot, expiry_ms=expires_at_ms)
        grant = Grant(
            ticket=secrets.token_bytes(16),
            block_ids=tuple(blocks),
            fence=Fence(slot, generation),
            expires_at_ms=expires_at_ms if grant_ms is None else monotonic_ms() + grant_ms,
        )
        if self.server is not None:
            self._offers[grant.ticket] = self.server.offer(grant)
        return grant

    def offer_of(self, grant: Grant) -> bytes:
        """Return the offer made for a grant."""
        return self._offers[grant.ticket]

    def connect(self, grant: Grant, stop: Stop | None = None) -> Link:
        """Return a link, which the rig closes in the end."""
        if self.kind.handed_over:
            link = self.backend.link(self.source, self.target)
        else:
            link = self.backend.connect(self.offer_of(grant), self.target, stop or patient())
        self._links.append(link)
        return link

    def request(self, grant: Grant, target_blocks: Sequence[int], *, first=0, **changes):
        """Return the request for ``len(target_blocks)`` of a grant's blocks."""
        fields = {
            "ticket": grant.ticket,
            "first_block": first,
            "source_blocks": grant.block_ids[first : first + len(target_blocks)],
            "source_layout": self.source.region.layout,
            "target_blocks": tuple(target_blocks),
            "fence": grant.fence,
        }
        return PullRequest(**{**fields, **changes})

    def pull(self, grant: Grant, target_blocks: Sequence[int], *, first=0, stop=None) -> PullReport:
        """Connect and pull."""
        stop = stop or patient()
        return self.connect(grant, stop).pull(self.request(grant, target_blocks, first=first), stop)

    def expected(self, source_blocks: Sequence[int], target_blocks: Sequence[int]):
        """Return what the target must hold after a pull, byte for byte."""
        wanted = np.full(self.target_bytes.size, UNTOUCHED, np.uint8)
        theirs, ours = self.source.region.layout, self.target.layout
        for layer in range(theirs.layers):
            for s, t in zip(source_blocks, target_blocks, strict=True):
                begin = theirs.offset + layer * theirs.layer_stride + s * theirs.block_stride
                end = ours.offset + layer * ours.layer_stride + t * ours.block_stride
                wanted[end : end + ours.block_bytes] = self.source_bytes[
                    begin : begin + theirs.block_bytes
                ]
        return wanted

    def close(self) -> None:
        """Let go of everything."""
        for link in self._links:
            link.close()
        if self.server is not None:
            self.server.close()
        self.source_bytes = self.target_bytes = np.zeros(0, np.uint8)
        self.source.region.view.release()
        self.target.view.release()
        del self.source, self.engine_slots
        for memory in self._memories:
            memory.close()
