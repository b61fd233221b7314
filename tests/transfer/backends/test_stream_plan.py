"""Cutting streams: both sides cut at the same places, whatever their memory looks like."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.transfer.backends.stream_plan import Share, cut_stream, shares

BLOCK = 24
OFFSETS = st.lists(st.integers(0, 40), max_size=30).map(
    lambda blocks: np.array(blocks, np.int64) * BLOCK
)


@given(offsets=OFFSETS, chunk_bytes=st.integers(1, 200))
def test_chunks_are_the_stream_cut_at_equal_places(offsets, chunk_bytes):
    memory = memoryview(np.random.default_rng(5).integers(0, 256, 41 * BLOCK, np.uint8).tobytes())
    stream = b"".join(memory[o : o + BLOCK] for o in offsets.tolist())
    chunks = list(cut_stream(offsets, BLOCK, chunk_bytes))
    cut = [stream[i : i + chunk_bytes] for i in range(0, len(stream), chunk_bytes)]
    assert [b"".join(chunk.views(memory)) for chunk in chunks] == cut
    assert [chunk.size_bytes for chunk in chunks] == [len(part) for part in cut]


def test_blocks_that_lie_together_are_one_part():
    offsets = np.array([0, 1, 2, 7, 8, 5], np.int64) * BLOCK
    (chunk,) = cut_stream(offsets, BLOCK, 1 << 20)
    assert chunk.offsets == [0, 7 * BLOCK, 5 * BLOCK]
    assert chunk.lengths == [3 * BLOCK, 2 * BLOCK, BLOCK]


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 4, 5, 1000])
@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
def test_shares_are_even_and_complete_and_none_is_empty(pieces, lanes):
    parts = shares(pieces, lanes)
    assert [i for part in parts for i in range(part.begin, part.end)] == list(range(pieces))
    assert len(parts) == min(lanes, pieces)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(sizes)


def test_a_share_counts_its_pieces():
    assert len(Share(3, 10)) == 7
