"""One engine's way to a store: puts blocks of its memory there, and brings blocks from it.

Whatever goes wrong, the answer is how many leading blocks are good and why there are no more.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from nearkv.block_keys import TOKEN_BYTES
from nearkv.transfer.backends.chunk_access import StagedRegion, chunk_reads, chunk_writes
from nearkv.transfer.backends.contract import Region, Stop
from nearkv.transfer.backends.stream_plan import Chunk, cut_stream
from nearkv.transfer.copying import order_reads
from nearkv.transfer.errors import LayoutError, PacketError, PullError, Reason, TransferError
from nearkv.transfer.layout import block_offsets, plan_runs
from nearkv.transfer.manifest import Compatibility, Source
from nearkv.transfer.store.contract import Bytes, StoredPrefix, StoreReport, Tier
from nearkv.transfer.store.packing import (
    MAX_HEAD_BYTES,
    Packer,
    Segment,
    segments,
    some_blocks,
)

DEFAULT_SEGMENT_BLOCKS = 16
_Found = tuple[Segment, str]


class StoreLink:
    """Moves KV between one memory and one tier, segment by segment.

    ``own`` says what the engine is; its rank has entries of its own, so with tensor
    parallelism what counts is the least of all ranks' blocks. All who share a store must use
    the same ``segment_blocks`` to find one another's segments. Raises :class:`LayoutError` when
    ``own`` is not about ``region``.

    A call holds one segment in memory: ``segment_blocks`` times the bytes of a block.
    """

    def __init__(  # noqa: PLR0913 (three are keyword-only and have defaults)
        self,
        tier: Tier,
        region: Region,
        own: Compatibility,
        source: Source,
        *,
        secret: bytes | None = None,
        tenant: str = "",
        segment_blocks: int = DEFAULT_SEGMENT_BLOCKS,
    ) -> None:
        if segment_blocks <= 0:
            raise ValueError("segment_blocks must be positive")
        for field in ("layers", "block_bytes"):
            ours, theirs = getattr(own.layout, field), getattr(region.layout, field)
            if ours != theirs:
                raise LayoutError(f"{field}: the engine has {ours}, its memory {theirs}")
        self._tier = tier
        self._region = region
        self._packer = Packer(own, source, secret, tenant)
        self._segment_blocks = segment_blocks

    def put(
        self,
        prefix: StoredPrefix,
        blocks: Sequence[int],
        stop: Stop,
        *,
        still_valid: Callable[[], None],
    ) -> StoreReport:
        """Store a prefix that lies in ``blocks``; segments that are there are kept.

        ``still_valid`` raises a ``TransferError`` when the blocks may have been reused (a
        lease's fence). It is called after each segment was read and before it is stored.
        Raises ``ValueError`` or :class:`LayoutError` when the arguments contradict each other.
        """
        if len(blocks) != len(prefix.block_keys):
            raise ValueError(f"{len(prefix.block_keys)} block keys for {len(blocks)} blocks")
        self._check_blocks(prefix, blocks, 0)
        tally = _Tally(time.monotonic())
        try:
            for segment in segments(len(blocks), self._segment_blocks):
                stop.check()
                key = self._packer.key(prefix, segment)
                if self._tier.touch(key, stop):
                    tally.there(segment)
                    continue
                body = self._gather(blocks[segment.begin : segment.end], stop)
                still_valid()
                self._tier.put(key, self._packer.pack(prefix, segment, body), stop)
                tally.moved(segment.end, len(body))
        except TransferError as error:
            return tally.report(error)
        return tally.report(None)

    def pull(
        self,
        prefix: StoredPrefix,
        target_blocks: Sequence[int],
        stop: Stop,
        *,
        skip_blocks: int = 0,
    ) -> StoreReport:
        """Bring a prefix, as much as is stored, to ``target_blocks``.

        The first ``skip_blocks`` blocks are there already and are left alone: ``target_blocks``
        are the places of those behind them, of all or of the first few. A segment is verified
        as a whole before its first byte is written, and an entry that does not pass is removed
        from the store. Target blocks behind ``report.blocks`` may hold anything. Raises
        ``ValueError`` or :class:`LayoutError` when the arguments contradict each other.
        """
        self._check_blocks(prefix, target_blocks, skip_blocks)
        tally = _Tally(time.monotonic(), skip_blocks)
        wanted = skip_blocks + len(target_blocks)
        try:
            while tally.blocks < wanted:
                stop.check()
                segment, key = self._find(prefix, tally.blocks, stop)
                body = self._fetch(prefix, segment, key, stop)
                end = min(segment.end, wanted)
                self._scatter(
                    some_blocks(
                        body,
                        layers=self._region.layout.layers,
                        begin=tally.blocks - segment.begin,
                        end=end - segment.begin,
                        block_bytes=self._region.layout.block_bytes,
                    ),
                    target_blocks[tally.blocks - skip_blocks : end - skip_blocks],
                    stop,
                )
                tally.moved(end, len(body))
        except TransferError as error:
            return tally.report(error)
        return tally.report(None)

    def _check_blocks(self, prefix: StoredPrefix, blocks: Sequence[int], skip: int) -> None:
        count = len(prefix.block_keys)
        if not 0 <= skip <= count or len(blocks) > count - skip:
            raise ValueError(f"{count} block keys, {skip} skipped, for {len(blocks)} blocks")
        block_size = self._packer.own.layout.block_size
        if len(prefix.token_ids) < count * block_size * TOKEN_BYTES:
            raise ValueError("token_ids: fewer tokens than the blocks hold")
        # Range, and no block twice.
        plan_runs(self._region.layout, self._region.layout, blocks, blocks)

    def _find(self, prefix: StoredPrefix, done: int, stop: Stop) -> _Found:
        """Return the longest stored segment at the cut before ``done`` that goes beyond it.

        A segment shorter than the others is a prefix's last, so it is only useful there.
        """
        begin = done - done % self._segment_blocks
        most = min(begin + self._segment_blocks, len(prefix.block_keys))
        candidates = [Segment(begin, end) for end in range(most, done, -1)]
        keys = [self._packer.key(prefix, segment) for segment in candidates]
        for segment, key, there in zip(
            candidates, keys, self._tier.present(keys, stop), strict=True
        ):
            if there:
                return segment, key
        raise PullError(Reason.NOT_STORED, f"the store has nothing behind block {done}")

    def _fetch(self, prefix: StoredPrefix, segment: Segment, key: str, stop: Stop) -> memoryview:
        """Return a segment's body, verified; an entry that does not pass is removed."""
        limit = self._packer.body_bytes(len(segment)) + MAX_HEAD_BYTES
        try:
            packet = self._tier.get(key, limit, stop)
            if packet is None:
                raise PullError(Reason.NOT_STORED, "the segment went away while it was asked for")
            return self._packer.unpack(prefix, segment, packet)
        except TransferError as error:
            # Its key says that it fits, so an entry that does not would be in the way for ever.
            if isinstance(error, PacketError) or error.reason is Reason.TOO_LARGE:
                with contextlib.suppress(TransferError):
                    self._tier.remove(key, stop)
            raise

    def _gather(self, blocks: Sequence[int], stop: Stop) -> memoryview:
        """Read blocks in (layer, block) order."""
        size = self._packer.body_bytes(len(blocks))
        if size > self._tier.max_value_bytes:
            raise PullError(
                Reason.TOO_LARGE,
                f"a segment of {size} bytes is over the store's {self._tier.max_value_bytes}",
            )
        body = memoryview(bytearray(size))
        chunk_bytes = self._packer.chunk_bytes
        at = 0
        with chunk_reads(self._region, self._cut(blocks), chunk_bytes) as chunks:
            for _, views in chunks:
                stop.check()
                for view in views:
                    body[at : at + len(view)] = view
                    at += len(view)
        order_reads()  # before the caller looks whether the blocks were still its own
        return body

    def _scatter(self, body: Bytes, blocks: Sequence[int], stop: Stop) -> None:
        """Write blocks from (layer, block) order."""
        if not isinstance(self._region, StagedRegion) and self._region.view.readonly:
            raise PullError(Reason.MEMORY, "the target's memory is mapped for reading only")
        source = memoryview(body)
        chunk_bytes = self._packer.chunk_bytes
        at = 0
        with chunk_writes(self._region, self._cut(blocks), chunk_bytes) as chunks:
            for _, views in chunks:
                stop.check()
                for view in views:
                    view[:] = source[at : at + len(view)]
                    at += len(view)

    def _cut(self, blocks: Sequence[int]) -> Sequence[Chunk]:
        layout = self._region.layout
        offsets = block_offsets(layout, np.asarray(blocks, dtype=np.int64))
        return list(cut_stream(offsets, layout.block_bytes, self._packer.chunk_bytes))


class _Tally:
    """What a call has done so far."""

    def __init__(self, begun: float, blocks: int = 0) -> None:
        self._begun = begun
        self._segments = 0
        self._size_bytes = 0
        self.blocks = blocks

    def there(self, segment: Segment) -> None:
        """Count a segment that needed no moving."""
        self.blocks = segment.end

    def moved(self, blocks: int, size_bytes: int) -> None:
        """Count a segment that was moved; so many ``blocks`` are good now."""
        self.blocks = blocks
        self._segments += 1
        self._size_bytes += size_bytes

    def report(self, error: TransferError | None) -> StoreReport:
        """Return the outcome."""
        return StoreReport(
            blocks=self.blocks,
            segments=self._segments,
            size_bytes=self._size_bytes,
            seconds=time.monotonic() - self._begun,
            reason=error.reason if error else None,
            detail=str(error) if error else "",
        )
