"""What both tiers promise, by way of the link that uses them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from nearkv.transfer.backends.contract import Region
from nearkv.transfer.errors import LayoutError, LeaseError, PacketError, PullError, Reason
from nearkv.transfer.store.contract import StoredPrefix
from nearkv.transfer.store.link import StoreLink
from nearkv.transfer.store.packing import Packer, Segment
from tests.transfer.store.stores import (
    BLOCK_BYTES,
    LAYERS,
    OWN,
    SOURCE,
    Engine,
    layout,
    prefix,
    stop,
)

LAYOUTS = {
    "plain": layout(),
    "gaps": layout(blocks=20, gap=96, offset=4096),
    "interleaved": layout(blocks=14, gap=32, interleaved=True),
}


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_a_prefix_comes_back_in_any_layout_and_nothing_else_is_written(kind, source, target):
    writer = Engine(kind.tier, LAYOUTS[source], seed=1)
    reader = Engine(kind.tier, LAYOUTS[target])
    blocks, places = [3, 4, 5, 9, 0, 13, 2, 1, 7, 6], [0, 1, 2, 12, 11, 3, 8, 5, 9, 4]
    put = writer.put(prefix(10), blocks)
    assert (put.blocks, put.segments, put.reason) == (10, 3, None)
    assert put.size_bytes == 10 * LAYERS * BLOCK_BYTES
    pulled = reader.pull(prefix(10), places)
    assert (pulled.blocks, pulled.segments, pulled.reason) == (10, 3, None)
    for block, place in zip(blocks, places, strict=True):
        assert writer.block(block) == reader.block(place)
    before = Engine(kind.tier, LAYOUTS[target]).data
    changed = (reader.data != before).sum()
    assert changed <= 10 * LAYERS * BLOCK_BYTES
    for place in set(range(reader.memory.blocks)) - set(places):
        assert set(reader.block(place)) == {0xEE}


def test_values_of_many_pieces_come_back(kind):
    memory = layout(blocks=4, block_bytes=(1 << 20) + 512)
    writer, reader = Engine(kind.tier, memory, seed=3), Engine(kind.tier, memory)
    assert writer.put(prefix(4), [0, 1, 2, 3]).reason is None
    assert kind.leftovers() == []
    assert reader.pull(prefix(4), [3, 2, 1, 0]).reason is None
    assert [writer.block(i) for i in range(4)] == [reader.block(3 - i) for i in range(4)]


def test_a_conversation_that_grows_stores_only_what_is_new(kind):
    writer = Engine(kind.tier, seed=1)
    assert writer.put(prefix(6), range(6)).segments == 2
    again = writer.put(prefix(6), range(6))
    assert (again.blocks, again.segments, again.size_bytes) == (6, 0, 0)
    grown = writer.put(prefix(12), range(12))
    assert (grown.blocks, grown.segments) == (12, 2)  # the first segment was there
    assert len(kind.raw()) == 4


@pytest.mark.parametrize(("stored", "asked", "common"), [(6, 11, 6), (8, 11, 8), (3, 3, 3)])
def test_as_much_comes_as_is_stored(kind, stored, asked, common):
    writer, reader = Engine(kind.tier, seed=1), Engine(kind.tier)
    writer.put(prefix(stored), range(stored))
    report = reader.pull(prefix(asked), range(asked))
    assert report.blocks == common
    assert report.reason is (None if common == asked else Reason.NOT_STORED)
    assert [reader.block(i) for i in range(common)] == [writer.block(i) for i in range(common)]


def test_prompts_share_the_segments_before_they_part(kind):
    writer, reader = Engine(kind.tier, seed=1), Engine(kind.tier)
    writer.put(prefix(12), range(12))
    other = prefix(12, changed_from=9 * 4)
    report = reader.pull(other, range(12))
    assert (report.blocks, report.reason) == (8, Reason.NOT_STORED)


def test_blocks_that_the_reader_has_are_left_alone(kind):
    writer, reader = Engine(kind.tier, seed=1), Engine(kind.tier)
    writer.put(prefix(11), range(11))
    report = reader.pull(prefix(11), range(6, 12), skip_blocks=5)
    assert (report.blocks, report.reason) == (11, None)
    assert [reader.block(i) for i in range(6, 12)] == [writer.block(i) for i in range(5, 11)]
    assert all(set(reader.block(i)) == {0xEE} for i in [*range(6), *range(12, 16)])


@pytest.mark.parametrize(("skip", "wanted"), [(0, 3), (0, 6), (5, 2), (5, 1), (4, 3)])
def test_a_reader_may_want_no_more_than_the_first_few(kind, skip, wanted):
    """A prompt's last token is always computed, and with it maybe the last block stored."""
    writer, reader = Engine(kind.tier, seed=1), Engine(kind.tier)
    writer.put(prefix(8), range(8))
    report = reader.pull(prefix(8), range(9, 9 + wanted), skip_blocks=skip)
    assert (report.blocks, report.reason) == (skip + wanted, None)
    for i in range(wanted):
        assert reader.block(9 + i) == writer.block(skip + i)
    assert all(set(reader.block(i)) == {0xEE} for i in [*range(9), *range(9 + wanted, 16)])


def test_other_tenants_find_nothing(kind):
    Engine(kind.tier, seed=1, tenant="a").put(prefix(4), range(4))
    assert Engine(kind.tier, tenant="b").pull(prefix(4), range(4)).reason is Reason.NOT_STORED
    assert Engine(kind.tier, tenant="a").pull(prefix(4), range(4)).blocks == 4


def test_what_is_stored_under_another_identity_is_not_found(kind):
    Engine(kind.tier, seed=1).put(prefix(4, salt="s"), range(4))
    model = msgspec.structs.replace(OWN.model, config_hash="f00d")
    for reader, asked in (
        (Engine(kind.tier), prefix(4)),
        (Engine(kind.tier), prefix(4, salt="t")),
        (Engine(kind.tier), prefix(4, salt="s", lora="adapter")),
        (Engine(kind.tier, own=msgspec.structs.replace(OWN, model=model)), prefix(4, salt="s")),
        (Engine(kind.tier, secret=b"k"), prefix(4, salt="s")),
    ):
        report = reader.pull(asked, range(4))
        assert (report.blocks, report.reason) == (0, Reason.NOT_STORED)
        assert reader.is_untouched()


def test_the_models_name_is_for_people(kind):
    Engine(kind.tier, seed=1).put(prefix(4), range(4))
    named = msgspec.structs.replace(
        OWN, model=msgspec.structs.replace(OWN.model, name="another-name")
    )
    assert Engine(kind.tier, own=named).pull(prefix(4), range(4)).blocks == 4


def with_part(part, **changes):
    value = msgspec.structs.replace(getattr(OWN, part), **changes)
    return msgspec.structs.replace(OWN, **{part: value})


@pytest.mark.parametrize(
    ("own", "stored", "reason"),
    [
        (with_part("model", config_hash="f00d"), prefix(4), Reason.MODEL),
        (with_part("numerics", kv_dtype="fp8"), prefix(4), Reason.DTYPE),
        (with_part("parallelism", tp_size=2), prefix(4), Reason.TOPOLOGY),
        (with_part("layout", name="NHD"), prefix(4), Reason.LAYOUT),
        (OWN, prefix(4, seed=2), Reason.PREFIX),
        (OWN, prefix(4, salt="s"), Reason.PREFIX),
        (OWN, prefix(4, lora="a"), Reason.PREFIX),
        (OWN, prefix(3), Reason.PREFIX),
    ],
    ids=["model", "dtype", "topology", "layout", "tokens", "salt", "lora", "fewer-blocks"],
)
def test_a_packet_under_a_wrong_key_is_refused_by_reason_and_removed(kind, own, stored, reason):
    count = len(stored.block_keys)
    Engine(kind.tier, own=own, seed=1).put(stored, range(count))
    [packet] = kind.raw().values()
    key = Packer(OWN, SOURCE).key(prefix(4), Segment(0, 4))
    kind.write(key, packet)
    reader = Engine(kind.tier)
    report = reader.pull(prefix(4), range(4))
    assert (report.blocks, report.reason) == (0, reason)
    assert reader.is_untouched()
    assert key not in kind.raw()


def test_tokens_before_the_segment_count_too(kind):
    """A collision of block keys must not give one prompt's KV to another."""
    ours, theirs = prefix(8), prefix(8, changed_from=0)
    forged = StoredPrefix(
        token_ids=theirs.token_ids[: 4 * 16] + ours.token_ids[4 * 16 :],
        block_keys=ours.block_keys,
    )
    Engine(kind.tier, seed=1).put(forged, range(8))
    reader = Engine(kind.tier)
    report = reader.pull(ours, range(4), skip_blocks=4)
    assert (report.blocks, report.reason) == (4, Reason.PREFIX)
    assert reader.is_untouched()


@pytest.mark.parametrize("secret", [None, b"k" * 32], ids=["plain", "signed"])
def test_every_damage_is_seen_before_anything_is_written(kind, secret):
    writer = Engine(kind.tier, seed=1, secret=secret)
    writer.put(prefix(4), range(4))
    [(key, packet)] = kind.raw().items()
    body_at = len(packet) - 4 * LAYERS * BLOCK_BYTES
    head_reasons = {Reason.MALFORMED, Reason.VERSION, Reason.TOO_LARGE, Reason.TRUNCATED}
    for at in [*range(24), *range(24, body_at, 7), *range(body_at, len(packet), 501)]:
        damaged = bytearray(packet)
        damaged[at] ^= 1 << at % 8
        kind.write(key, bytes(damaged))
        reader = Engine(kind.tier, secret=secret)
        report = reader.pull(prefix(4), range(4))
        # Behind magic, version and length all is under a digest or the signature.
        allowed = {Reason.CORRUPT} if at >= body_at else {Reason.CORRUPT, Reason.AUTH}
        assert report.reason in (allowed | head_reasons if at < 12 else allowed), at
        assert report.blocks == 0
        assert reader.is_untouched()
        assert kind.raw() == {}


def test_every_truncation_and_growth_is_seen(kind):
    Engine(kind.tier, seed=1).put(prefix(4), range(4))
    [(key, packet)] = kind.raw().items()
    for value in [packet[:end] for end in range(1, len(packet), 97)] + [packet + b"x"]:
        kind.write(key, value)
        reader = Engine(kind.tier)
        report = reader.pull(prefix(4), range(4))
        assert (report.blocks, report.reason) == (0, Reason.TRUNCATED)
        assert reader.is_untouched()
        assert kind.raw() == {}


def test_segments_before_a_damaged_one_count(kind):
    writer, reader = Engine(kind.tier, seed=1), Engine(kind.tier)
    writer.put(prefix(8), range(8))
    key = Packer(OWN, SOURCE).key(prefix(8), Segment(4, 8))
    packet = bytearray(kind.raw()[key])
    packet[-1] ^= 1
    kind.write(key, bytes(packet))
    report = reader.pull(prefix(8), range(8))
    assert (report.blocks, report.segments, report.reason) == (4, 1, Reason.CORRUPT)
    assert all(set(reader.block(i)) == {0xEE} for i in range(4, 8))
    assert writer.put(prefix(8), range(8)).segments == 1  # and it can be stored anew
    assert reader.pull(prefix(8), range(8)).blocks == 8


def test_a_giant_value_is_not_read(kind):
    key = Packer(OWN, SOURCE).key(prefix(4), Segment(0, 4))
    kind.write(key, bytes(5 << 20))
    report = Engine(kind.tier).pull(prefix(4), range(4))
    assert (report.blocks, report.reason) == (0, Reason.TOO_LARGE)
    assert kind.raw() == {}


def test_blocks_that_were_reused_meanwhile_are_not_stored(kind):
    def stale():
        raise LeaseError(Reason.STALE, "the slot was closed")

    report = Engine(kind.tier, seed=1).put(prefix(4), range(4), still_valid=stale)
    assert (report.blocks, report.reason) == (0, Reason.STALE)
    assert kind.raw() == {}
    assert kind.leftovers() == []


def test_calls_end_by_deadline_and_cancellation(kind):
    engine = Engine(kind.tier, seed=1)
    cancelled = stop()
    cancelled.cancel()
    for until, reason in ((stop(-1), Reason.DEADLINE), (cancelled, Reason.CANCELLED)):
        assert engine.put(prefix(4), range(4), until).reason is reason
        assert engine.pull(prefix(4), range(4), until).reason is reason
    assert kind.raw() == {}


def test_writers_and_readers_at_the_same_time_see_whole_packets_only(kind):
    prefixes = [prefix(8, seed=seed) for seed in range(3)]
    writer = Engine(kind.tier, seed=1)  # its data is the same for all writers
    start = threading.Barrier(6)

    def write():
        start.wait()
        return [
            Engine(kind.tier, seed=1).put(one, range(8)).reason for one in prefixes for _ in "ab"
        ]

    def read():
        start.wait()
        outcomes = []
        for one in prefixes * 2:
            reader = Engine(kind.tier)
            report = reader.pull(one, range(8))
            outcomes.append(report.reason)
            for i in range(report.blocks):
                assert reader.block(i) == writer.block(i)
        return outcomes

    with ThreadPoolExecutor(6) as pool:
        writes = [pool.submit(write) for _ in range(3)]
        reads = [pool.submit(read) for _ in range(3)]
        assert {reason for one in writes for reason in one.result()} == {None}
        assert {reason for one in reads for reason in one.result()} <= {None, Reason.NOT_STORED}
    assert len(kind.raw()) == 6
    assert kind.leftovers() == []


def test_a_target_for_reading_only_is_refused(kind):
    engine = Engine(kind.tier, seed=1)
    engine.put(prefix(4), range(4))
    region = Region(memoryview(bytes(engine.data)), engine.memory)
    report = StoreLink(kind.tier, region, OWN, SOURCE, segment_blocks=4).pull(
        prefix(4), range(4), stop()
    )
    assert (report.blocks, report.reason) == (0, Reason.MEMORY)


def test_arguments_that_contradict_each_other_are_refused(kind):
    engine = Engine(kind.tier, seed=1)
    with pytest.raises(ValueError, match="4 block keys for 3 blocks"):
        engine.put(prefix(4), range(3))
    with pytest.raises(ValueError, match="4 block keys, 2 skipped, for 3 blocks"):
        engine.pull(prefix(4), range(3), skip_blocks=2)
    with pytest.raises(LayoutError, match="outside"):
        engine.put(prefix(2), [0, 16])
    with pytest.raises(LayoutError, match="twice"):
        engine.pull(prefix(2), [1, 1])
    short = StoredPrefix(token_ids=b"\0" * 4, block_keys=(1,))
    with pytest.raises(ValueError, match="token_ids"):
        engine.pull(short, [0])
    region = Region(memoryview(engine.data), layout(block_bytes=256))
    with pytest.raises(LayoutError, match="block_bytes"):
        StoreLink(kind.tier, region, OWN, SOURCE)


def test_salts_do_not_lie_in_the_store(kind):
    Engine(kind.tier, seed=1).put(prefix(4, salt="very-secret-salt"), range(4))
    [packet] = kind.raw().values()
    assert b"very-secret-salt" not in packet


def test_a_head_signed_with_another_secret_is_refused():
    segment = Segment(0, 4)
    body = memoryview(bytes(4 * LAYERS * BLOCK_BYTES))
    packet = b"".join(Packer(OWN, SOURCE, b"theirs").pack(prefix(4), segment, body))
    with pytest.raises(PacketError) as error:
        Packer(OWN, SOURCE, b"ours").unpack(prefix(4), segment, packet)
    assert error.value.reason is Reason.AUTH


def test_values_over_the_limit_are_refused_before_they_are_sent(kind):
    with pytest.raises(PullError) as error:
        kind.tier.put("ab" * 20, [memoryview(bytearray(1 << 20))] * 513, stop())
    assert error.value.reason is Reason.TOO_LARGE
    assert kind.raw() == {}
