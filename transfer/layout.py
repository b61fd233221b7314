"""Where blocks lie in an engine's KV memory, and what to copy (pure).

One buffer holds all layers; block ``b`` of layer ``l`` starts at
``offset + l * layer_stride + b * block_stride`` and is ``block_bytes`` long
(reference/vllm.md 6.5: all layers are views of one buffer). Blocks that follow one another on
both sides are copied as one run: moving 16 KiB pieces one by one costs half the bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nearkv.transfer.errors import LayoutError

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """An engine's KV buffer; sizes in bytes. Raises :class:`LayoutError` when it cannot be."""

    size: int
    layers: int
    blocks: int
    layer_stride: int
    block_stride: int
    block_bytes: int
    offset: int = 0

    def __post_init__(self) -> None:
        counts = (self.size, self.layers, self.blocks, self.block_bytes)
        if min(counts) <= 0 or self.offset < 0:
            raise LayoutError("sizes and counts must be positive")
        if self.block_bytes > self.block_stride:
            raise LayoutError("blocks overlap: block_bytes is over block_stride")
        # Layers lie one after the other, or side by side within each block.
        one_by_one = self.layer_stride >= self._layer_span
        interleaved = self.block_bytes <= self.layer_stride <= self.block_stride // self.layers
        if self.layers > 1 and not (one_by_one or interleaved):
            raise LayoutError("layers overlap: layer_stride fits neither form")
        if self.end > self.size:
            raise LayoutError(f"the last block ends at {self.end}, behind the buffer's {self.size}")

    @property
    def _layer_span(self) -> int:
        return (self.blocks - 1) * self.block_stride + self.block_bytes

    @property
    def end(self) -> int:
        """Where the last block of the last layer ends."""
        return self.offset + (self.layers - 1) * self.layer_stride + self._layer_span


@dataclass(frozen=True, slots=True)
class Runs:
    """Copies to make: ``length[i]`` bytes from ``source[i]`` to ``target[i]``."""

    source: Offsets
    target: Offsets
    length: Offsets

    def __len__(self) -> int:
        """Return how many copies there are."""
        return int(self.length.size)

    @property
    def total_bytes(self) -> int:
        """Bytes of all copies."""
        return int(self.length.sum())


def plan_runs(
    source: KvMemory, target: KvMemory, source_blocks: Sequence[int], target_blocks: Sequence[int]
) -> Runs:
    """Return the copies that bring ``source_blocks`` to ``target_blocks``, coalesced.

    Raises :class:`LayoutError` when the layouts differ, a block is out of range, or a target
    block is named twice.
    """
    _check_pair(source, target)
    if len(source_blocks) != len(target_blocks):
        raise LayoutError(f"{len(source_blocks)} blocks for {len(target_blocks)} places")
    from_blocks = _checked(source_blocks, source.blocks, "source")
    to_blocks = _checked(target_blocks, target.blocks, "target")
    if np.unique(to_blocks).size != to_blocks.size:
        raise LayoutError("a target block is named twice")
    return _coalesce(
        block_offsets(source, from_blocks), block_offsets(target, to_blocks), source.block_bytes
    )


def _check_pair(source: KvMemory, target: KvMemory) -> None:
    for field in ("layers", "block_bytes"):
        ours, theirs = getattr(target, field), getattr(source, field)
        if ours != theirs:
            raise LayoutError(f"{field}: source has {theirs}, target has {ours}")


def _checked(blocks: Sequence[int], count: int, side: str) -> Offsets:
    try:
        ids = np.asarray(blocks, dtype=np.int64)
    except OverflowError:
        raise LayoutError(f"a {side} block is outside 0..{count - 1}") from None
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise LayoutError(f"a {side} block is outside 0..{count - 1}")
    return ids


def block_offsets(memory: KvMemory, blocks: Offsets) -> Offsets:
    """Return the byte offset of each (layer, block), layer by layer; ranges are not checked."""
    layers = memory.offset + np.arange(memory.layers, dtype=np.int64) * memory.layer_stride
    return (layers[:, None] + blocks[None, :] * memory.block_stride).ravel()


def _coalesce(source: Offsets, target: Offsets, block_bytes: int) -> Runs:
    """Join copies that follow one another on both sides."""
    if not source.size:
        return Runs(source, target, source)
    joined = (np.diff(source) == block_bytes) & (np.diff(target) == block_bytes)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    counts = np.diff(np.concatenate((starts, [source.size])))
    return Runs(source[starts], target[starts], counts * block_bytes)


def cut_runs(runs: Runs, *, chunk_bytes: int) -> list[Runs]:
    """Cut runs into chunks of at most ``chunk_bytes``, in order; a long run is split.

    Chunks are what is in flight at once: small enough to bound memory, large enough that
    their number does not count.
    """
    if chunk_bytes <= 0:
        raise ValueError("chunk_bytes must be positive")
    pieces = _split_long(runs, chunk_bytes)
    ends = np.cumsum(pieces.length)
    chunks: list[Runs] = []
    start = filled = 0
    while start < len(pieces):
        # The first piece always goes in: no piece is longer than a chunk.
        stop = int(np.searchsorted(ends, filled + chunk_bytes, side="right"))
        chunks.append(_part(pieces, start, stop))
        start, filled = stop, int(ends[stop - 1])
    return chunks


def _split_long(runs: Runs, chunk_bytes: int) -> Runs:
    """Split runs that are longer than a chunk."""
    if not len(runs) or int(runs.length.max()) <= chunk_bytes:
        return runs
    parts = -(-runs.length // chunk_bytes)
    which = np.repeat(np.arange(len(runs)), parts)
    nth = np.arange(which.size) - np.repeat(np.cumsum(parts) - parts, parts)
    shift = nth * chunk_bytes
    length = np.minimum(chunk_bytes, runs.length[which] - shift)
    return Runs(runs.source[which] + shift, runs.target[which] + shift, length)


def _part(runs: Runs, start: int, stop: int) -> Runs:
    return Runs(runs.source[start:stop], runs.target[start:stop], runs.length[start:stop])
