"""Device memory through pinned host memory, in chunks: for transports that move host memory.

A ring has two slots, so that the device copies one chunk while the transport has the other.
Copies between device and pinned memory run at the speed of the bus, several times that of any
stream, so what staging adds is one chunk's copy.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import NoReturn, Protocol

from nearkv.transfer.backends.stream_plan import Chunk
from nearkv.transfer.cuda.context import DeviceContext
from nearkv.transfer.cuda.copy_queue import DEPTH, CopyQueue, end_process
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.errors import PullError, Reason, TransferError

MAX_SLOT_BYTES = 64 << 20
"""More than any transport's chunk; what a peer asks for must not pin all memory there is."""

StagedChunk = tuple[Chunk, list[memoryview]]
"""A chunk, and where its bytes are on the host, in order, for as long as it is its turn."""

StagedChunks = Generator[StagedChunk, None, None]
Broken = Callable[[TransferError], NoReturn]


class Staged(Protocol):
    """The memory that chunks are a part of."""

    address: int
    size_bytes: int


class StagingRing:
    """Pinned slots of ``slot_bytes`` with a queue of copies; for one use at a time.

    Raises :class:`PullError`: ``MEMORY`` when no memory can be pinned, ``RANGE`` for slots
    that are too large.
    """

    def __init__(
        self, context: DeviceContext, slot_bytes: int, *, broken: Broken = end_process
    ) -> None:
        if not 0 < slot_bytes <= MAX_SLOT_BYTES:
            raise PullError(
                Reason.RANGE, f"chunks of {slot_bytes} bytes, at most {MAX_SLOT_BYTES} are staged"
            )
        self.slot_bytes = slot_bytes
        with ExitStack() as undo:
            with context.use() as driver:
                pointer = driver.allocate_host(slot_bytes * DEPTH)
            undo.callback(context.run, driver.free_host, pointer)
            self._queue = CopyQueue(context, broken=broken)
            undo.callback(self._queue.close)
            self._undo = undo.pop_all()
        self._pointers = [pointer + i * slot_bytes for i in range(DEPTH)]
        self._slots = [_view(begin, slot_bytes) for begin in self._pointers]

    def reads(self, memory: Staged, chunks: Iterable[Chunk]) -> StagedChunks:
        """Bring chunks of device memory here; each stays until the next is asked for.

        The device reads one chunk ahead. Close the iterator: no copy is under way then.
        """
        ready: deque[tuple[Chunk, int]] = deque()
        try:
            for number, chunk in enumerate(chunks):
                slot = number % DEPTH
                self._check(chunk, memory)
                self._queue.submit(_copies_to_host(self._pointers[slot], memory.address, chunk))
                ready.append((chunk, slot))
                if len(ready) == DEPTH:
                    yield self._read(*ready.popleft())
            while ready:
                yield self._read(*ready.popleft())
        finally:
            self._queue.wait_all()

    def writes(self, memory: Staged, chunks: Iterable[Chunk]) -> StagedChunks:
        """Offer room for chunks; what was put there is written when the next is asked for.

        Close the iterator: nobody writes then, and a chunk whose turn it was is not written.
        """
        try:
            for number, chunk in enumerate(chunks):
                slot = number % DEPTH
                self._check(chunk, memory)
                if len(self._queue) == DEPTH:  # the slot's last copy is the oldest
                    self._queue.wait_oldest()
                yield chunk, [self._slots[slot][: chunk.size_bytes]]
                self._queue.submit(_copies_to_device(self._pointers[slot], memory.address, chunk))
        finally:
            self._queue.wait_all()

    def close(self) -> None:
        """Wait for copies and unpin; may be called twice."""
        self._slots.clear()
        self._undo.close()

    def _read(self, chunk: Chunk, slot: int) -> StagedChunk:
        self._queue.wait_oldest()
        return chunk, [self._slots[slot][: chunk.size_bytes]]

    def _check(self, chunk: Chunk, memory: Staged) -> None:
        if chunk.size_bytes > self.slot_bytes:
            raise PullError(
                Reason.RANGE, f"a chunk of {chunk.size_bytes} bytes, slots have {self.slot_bytes}"
            )
        for offset, length in zip(chunk.offsets, chunk.lengths, strict=True):
            if offset < 0 or offset + length > memory.size_bytes:
                raise PullError(
                    Reason.RANGE, f"a part lies outside the memory's {memory.size_bytes} bytes"
                )


class StagingShelf:
    """Rings of one memory that wait for their next use: pinning takes longer than copying.

    Any thread may use it.
    """

    def __init__(self, context: DeviceContext, *, broken: Broken = end_process) -> None:
        self._context = context
        self._broken = broken
        self._lock = threading.Lock()
        self._idle: list[StagingRing] = []
        self._closed = False

    @contextmanager
    def reads(
        self, memory: Staged, chunks: Iterable[Chunk], chunk_bytes: int
    ) -> Iterator[StagedChunks]:
        """Lend a ring for :meth:`StagingRing.reads`; closes what that returns."""
        with self._ring(chunk_bytes) as ring, closing(ring.reads(memory, chunks)) as staged:
            yield staged

    @contextmanager
    def writes(
        self, memory: Staged, chunks: Iterable[Chunk], chunk_bytes: int
    ) -> Iterator[StagedChunks]:
        """Lend a ring for :meth:`StagingRing.writes`; closes what that returns."""
        with self._ring(chunk_bytes) as ring, closing(ring.writes(memory, chunks)) as staged:
            yield staged

    def close(self) -> None:
        """Close the rings that are not in use; those that are follow when they come back."""
        with self._lock:
            self._closed = True
            rings, self._idle = self._idle, []
        for ring in rings:
            ring.close()

    @contextmanager
    def _ring(self, slot_bytes: int) -> Iterator[StagingRing]:
        with self._lock:
            fitting = [ring for ring in self._idle if ring.slot_bytes >= slot_bytes]
            ring = fitting[0] if fitting else None
            if ring is not None:
                self._idle.remove(ring)
        if ring is None:
            ring = StagingRing(self._context, slot_bytes, broken=self._broken)
        try:
            yield ring
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append(ring)
            if not keep:
                ring.close()


def _view(pointer: int, size_bytes: int) -> memoryview:
    """Return a view of memory that this process may use there."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(pointer)).cast("B")


def _copies_to_host(pointer: int, base: int, chunk: Chunk) -> Callable[[Driver, int], None]:
    def copies(driver: Driver, stream: int) -> None:
        at = pointer
        for offset, length in zip(chunk.offsets, chunk.lengths, strict=True):
            driver.copy_to_host(at, base + offset, length, stream)
            at += length

    return copies


def _copies_to_device(pointer: int, base: int, chunk: Chunk) -> Callable[[Driver, int], None]:
    def copies(driver: Driver, stream: int) -> None:
        at = pointer
        for offset, length in zip(chunk.offsets, chunk.lengths, strict=True):
            driver.copy_to_device(base + offset, at, length, stream)
            at += length

    return copies
