"""Cutting blocks into a byte stream of chunks (pure).

A stream is the blocks in (layer, block) order, a lane a contiguous share of it. Where the
bytes lie is each side's own affair: both cut at the same places of the *stream*, and each joins
what lies together in its own memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nearkv.transfer.layout import Offsets


@dataclass(frozen=True, slots=True)
class Share:
    """A lane's part of a stream: pieces ``begin`` to ``end`` (not included)."""

    begin: int
    end: int

    def __len__(self) -> int:
        """Return how many pieces there are."""
        return self.end - self.begin


def shares(pieces: int, lanes: int) -> list[Share]:
    """Divide pieces among at most ``lanes`` lanes, as evenly as it goes; none is empty."""
    lanes = min(lanes, pieces)
    edges = [pieces * i // lanes for i in range(lanes + 1)] if lanes else []
    return [Share(edges[i], edges[i + 1]) for i in range(lanes)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a stream: where its bytes lie in memory, in order."""

    size_bytes: int
    offsets: list[int]
    lengths: list[int]

    def views(self, memory: memoryview) -> list[memoryview]:
        """Return the chunk's parts of a memory."""
        return [
            memory[offset : offset + length]
            for offset, length in zip(self.offsets, self.lengths, strict=True)
        ]


def cut_stream(offsets: Offsets, block_bytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield the chunks of blocks that lie at ``offsets``; all but the last are full."""
    total = int(offsets.size) * block_bytes
    if not total:
        return
    starts = np.concatenate(([0], np.flatnonzero(np.diff(offsets) != block_bytes) + 1))
    run_begins = starts * block_bytes
    cuts = np.union1d(run_begins, np.arange(0, total, chunk_bytes))
    run = np.searchsorted(run_begins, cuts, side="right") - 1
    places = offsets[starts[run]] + cuts - run_begins[run]
    lengths = np.diff(np.append(cuts, total))
    edges = np.searchsorted(cuts, np.arange(0, total + chunk_bytes, chunk_bytes))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if first < last:
            part = lengths[first:last]
            yield Chunk(int(part.sum()), places[first:last].tolist(), part.tolist())
