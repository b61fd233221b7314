"""Device memory through pinned host memory, chunk by chunk."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearkv.transfer.backends.stream_plan import Chunk, cut_stream
from nearkv.transfer.cuda.staging import StagingRing, StagingShelf
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import block_offsets
from tests.transfer.backends.rig import layout
from tests.transfer.cuda.device_rig import CudaKind, DeviceRig, raise_broken
from tests.transfer.cuda.fake_cuda import Machine

CHUNK = 1000
LAYOUT = layout(layers=2, blocks=12, block_bytes=512, gap_bytes=16)


def chunks_of(memory, blocks, chunk_bytes=CHUNK):
    offsets = block_offsets(memory, np.asarray(blocks, np.int64))
    return list(cut_stream(offsets, memory.block_bytes, chunk_bytes))


def host_bytes(array, chunks):
    parts = [array[o : o + n] for c in chunks for o, n in zip(c.offsets, c.lengths, strict=True)]
    return b"".join(part.tobytes() for part in parts)


def read(region, chunks, chunk_bytes=CHUNK):
    got = []
    with region.reads(chunks, chunk_bytes) as staged:
        got.extend(b"".join(parts) for _, parts in staged)
    return b"".join(got)


def write(region, chunks, data, chunk_bytes=CHUNK):
    position = 0
    with region.writes(chunks, chunk_bytes) as staged:
        for chunk, parts in staged:
            for part in parts:
                part[:] = data[position : position + len(part)]
                position += len(part)
            assert sum(map(len, parts)) == chunk.size_bytes
    assert position == len(data)


def test_chunks_are_read_in_order_and_whole(make_rig):
    rig = make_rig(LAYOUT)
    chunks = chunks_of(LAYOUT, [3, 4, 9, 0])
    assert len(chunks) > 3
    assert read(rig.source.region, chunks) == host_bytes(rig.source_bytes, chunks)


def test_chunks_are_written_to_their_places_and_nowhere_else(make_rig):
    rig = make_rig(LAYOUT)
    blocks, places = [3, 4, 9, 0], [8, 1, 2, 11]
    data = host_bytes(rig.source_bytes, chunks_of(LAYOUT, blocks))
    write(rig.target, chunks_of(LAYOUT, places), data)
    assert (rig.target_bytes == rig.expected(blocks, places)).all()


def test_nothing_to_stage_is_no_trouble(make_rig):
    rig = make_rig(LAYOUT)
    assert read(rig.source.region, []) == b""
    write(rig.target, [], b"")


def test_the_device_reads_ahead_while_a_chunk_is_with_the_transport(make_rig, kind):
    rig = make_rig(LAYOUT)
    with rig.source.region.reads(chunks_of(LAYOUT, range(6)), CHUNK) as staged:
        next(staged)
        assert len(rig.source.region._shelf._idle) == 0
        assert any(kind.library.streams.values())


def test_reading_ahead_does_not_touch_the_chunk_that_is_with_the_transport(make_rig, kind):
    rig = make_rig(LAYOUT)
    chunks = chunks_of(LAYOUT, range(6))
    memory = rig.source.region.memory
    with rig.source.region.reads(chunks, CHUNK) as staged:
        for chunk, parts in staged:
            with memory.context.use() as driver:  # the device is as quick as it can be
                for stream in list(kind.library.streams):
                    driver.synchronise(stream)
            assert b"".join(parts) == host_bytes(rig.source_bytes, [chunk])


def test_a_reader_that_stops_halfway_leaves_no_copy_behind(make_rig, kind):
    rig = make_rig(LAYOUT)

    def lose_the_peer():
        with rig.source.region.reads(chunks_of(LAYOUT, range(6)), CHUNK) as staged:
            next(staged)
            raise RuntimeError("the peer is lost")

    with pytest.raises(RuntimeError, match="lost"):
        lose_the_peer()
    assert not any(kind.library.streams.values())


def test_a_writer_that_stops_halfway_leaves_no_copy_behind_and_does_not_write_its_chunk(
    make_rig, kind
):
    rig = make_rig(LAYOUT)
    chunks = chunks_of(LAYOUT, range(6))

    def lose_the_peer():
        with rig.target.writes(chunks, CHUNK) as staged:
            for number, (_, parts) in enumerate(staged):
                parts[0][:] = bytes([number]) * len(parts[0])
                if number == 3:
                    raise RuntimeError("the peer is lost")

    with pytest.raises(RuntimeError, match="lost"):
        lose_the_peer()
    assert not any(kind.library.streams.values())
    for number, chunk in enumerate(chunks):
        held = set(host_bytes(rig.target_bytes, [chunk]))
        assert held == ({number} if number < 3 else {0xEE})


def test_a_ring_is_used_again_and_two_uses_at_once_have_two(make_rig, kind):
    rig = make_rig(LAYOUT)
    chunks = chunks_of(LAYOUT, [1, 2])
    for _ in range(3):
        read(rig.source.region, chunks)
    assert kind.library.calls.count("cuMemAllocHost_v2") == 1
    with (
        rig.source.region.reads(chunks, CHUNK) as one,
        rig.source.region.reads(chunks, CHUNK) as two,
    ):
        assert bytes(next(one)[1][0]) == bytes(next(two)[1][0])
    assert kind.library.calls.count("cuMemAllocHost_v2") == 2
    read(rig.source.region, chunks_of(LAYOUT, [1, 2], 5000), 5000)  # larger than those there are
    assert kind.library.calls.count("cuMemAllocHost_v2") == 3


def test_a_region_closed_while_a_ring_is_out_gets_rid_of_it_when_it_is_back(make_rig, kind):
    rig = make_rig(LAYOUT)
    shelf = rig.source.region._shelf
    with rig.source.region.reads(chunks_of(LAYOUT, [1]), CHUNK) as staged:
        list(staged)
        shelf.close()
        assert kind.library.pinned
    assert not kind.library.pinned


def test_source_memory_cannot_be_written(make_rig):
    rig = make_rig(LAYOUT)
    with pytest.raises(PullError, match="for reading only") as caught:
        rig.source.region.writes([], CHUNK)
    assert caught.value.reason is Reason.MEMORY


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(CHUNK + 1, [0], [CHUNK + 1]), "slots have 1000"),
        (Chunk(10, [-1], [10]), "outside"),
        (Chunk(10, [LAYOUT.size - 9], [10]), "outside"),
    ],
    ids=["too long", "before", "behind"],
)
def test_parts_that_are_none_are_refused(make_rig, chunk, message):
    rig = make_rig(LAYOUT)
    for use in (rig.source.region.reads, rig.target.writes):
        with pytest.raises(PullError, match=message) as caught, use([chunk], CHUNK) as staged:
            next(staged)
        assert caught.value.reason is Reason.RANGE


@pytest.mark.parametrize("call", ["cuMemAllocHost_v2", "cuStreamCreate", "cuEventCreate"])
def test_a_ring_that_cannot_be_made_leaves_nothing(make_rig, kind, call):
    rig = make_rig(LAYOUT)
    kind.library.fail[call] = 2
    with pytest.raises(PullError, match=call), rig.target.writes([], CHUNK) as staged:
        next(staged)
    kind.library.fail.clear()


def test_a_copy_that_cannot_be_queued_ends_the_reading(make_rig, kind):
    rig = make_rig(LAYOUT)
    kind.library.fail["cuMemcpyDtoHAsync_v2"] = 1
    with pytest.raises(PullError, match="cuMemcpyDtoHAsync_v2"):
        read(rig.source.region, chunks_of(LAYOUT, range(6)))


def test_a_closed_ring_is_closed_for_good(make_rig):
    rig = make_rig(LAYOUT)
    ring = StagingRing(rig.target.memory.context, CHUNK, broken=raise_broken)
    ring.close()
    ring.close()
    with (
        closing(ring.reads(rig.target.memory, chunks_of(LAYOUT, [1]))) as staged,
        pytest.raises(PullError, match="closed"),
    ):
        next(staged)
    StagingShelf(rig.target.memory.context).close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.integers(1, 3),
    block_bytes=st.sampled_from([1, 7, 64, 3000]),
    chunk_bytes=st.sampled_from([1, 13, 100, 4096]),
    seed=st.integers(0, 1 << 30),
)
def test_what_is_read_there_and_written_here_is_a_pull(layers, block_bytes, chunk_bytes, seed):
    """The two ends of a stream cut at the same places, whatever the layouts."""
    random = np.random.default_rng(seed)
    if block_bytes > 100:
        chunk_bytes = max(chunk_bytes, 100)
    ends = [
        layout(layers=layers, blocks=6, block_bytes=block_bytes, gap_bytes=int(random.integers(9)))
        for _ in range(2)
    ]
    blocks, places = (random.permutation(6)[:4].tolist() for _ in range(2))
    machine = Machine()
    rig = DeviceRig(CudaKind(machine), *ends)
    try:
        data = read(rig.source.region, chunks_of(ends[0], blocks, chunk_bytes), chunk_bytes)
        write(rig.target, chunks_of(ends[1], places, chunk_bytes), data, chunk_bytes)
        assert (rig.target_bytes == rig.expected(blocks, places)).all()
    finally:
        rig.close()
    machine.check()
