"""The state packet: golden bytes, truncation, bit flips, hostile heads."""

import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.block_keys import pack_keys, pack_tokens
from nearkv.transfer.errors import PacketError, Reason
from nearkv.transfer.manifest import (
    BlockLayout,
    Chunk,
    Compatibility,
    LeaseRef,
    Manifest,
    ModelIdentity,
    Numerics,
    Parallelism,
    Prefix,
    Source,
    check_fit,
)
from nearkv.transfer.packet import chunk_of, decode_head, encode_head, verified_chunks

BODY = bytes(range(200)) * 2
CHUNKS = (chunk_of(0, BODY[:256]), chunk_of(256, BODY[256:]))
COMPATIBLE = Compatibility(
    model=ModelIdentity(name="tiny", config_hash="c0ffee"),
    numerics=Numerics(kv_dtype="bfloat16"),
    parallelism=Parallelism(),
    layout=BlockLayout(
        name="LBHNC", block_size=32, layers=4, layer_stride=1 << 20, block_stride=8192,
        block_bytes=8192,
    ),
)  # fmt: skip
MANIFEST = Manifest(
    compatibility=COMPATIBLE,
    source=Source(engine="p0", epoch="e1", node="n1"),
    prefix=Prefix(token_ids=pack_tokens(range(70)), num_tokens=70, block_keys=pack_keys([7, 8])),
    block_ids=(3, 9),
    lease=LeaseRef(id="l1", slot=2, generation=5, ttl_ms=30_000),
    chunks=CHUNKS,
)
KEY = b"k" * 32
REQUEST = pack_tokens(range(100))
GOLDEN = "3ec2f536bffcf81f8723463966db00675291cc4d126a14d11a321bd43dcf3542"


def refused(reason, call, *arguments, **options):
    with pytest.raises(PacketError) as error:
        call(*arguments, **options)
    assert error.value.reason is reason
    return str(error.value)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "signed"])
def test_round_trip(key):
    data = encode_head(MANIFEST, key=key) + BODY
    head = decode_head(data, key=key)
    assert head.manifest == MANIFEST
    body = data[head.head_bytes :]
    assert b"".join(verified_chunks(head, body)) == BODY


def test_golden_bytes_of_version_1_0():
    data = encode_head(MANIFEST, key=KEY)
    assert data[:24] == b"KVSP" + struct.pack("<HHIQI", 1, 0, len(data) - 24 - 40, 400, 1)
    assert hashlib.sha256(data).hexdigest() == GOLDEN


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "signed"])
def test_every_truncation_is_seen(key):
    data = encode_head(MANIFEST, key=key)
    for end in range(len(data)):
        refused(Reason.TRUNCATED, decode_head, data[:end], key=key)


def test_every_flipped_bit_is_seen():
    data = bytearray(encode_head(MANIFEST, key=KEY))
    for at in range(len(data) * 8):
        data[at // 8] ^= 1 << at % 8
        with pytest.raises(PacketError):
            decode_head(data, key=KEY)
        data[at // 8] ^= 1 << at % 8


@given(st.binary(max_size=300))
def test_noise_is_refused_and_nothing_else(noise):
    for data in (noise, b"KVSP" + noise, encode_head(MANIFEST)[:40] + noise):
        with pytest.raises(PacketError):
            decode_head(data)


def test_a_newer_minor_version_may_add_fields():
    fields = msgspec.to_builtins(MANIFEST, builtin_types=(bytes,)) | {"colour": "blue"}
    header = msgspec.msgpack.encode(fields)
    decoded = msgspec.msgpack.decode(header, type=Manifest)
    assert decoded == MANIFEST


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"X", Reason.MALFORMED),
        (4, b"\x02", Reason.VERSION),
        (8, b"\xff\xff\xff\xff", Reason.TOO_LARGE),
        (12, b"\xff", Reason.CORRUPT),
    ],
    ids=["magic", "major", "header-length", "body-length"],
)
def test_hostile_heads_are_refused_by_reason(at, value, reason):
    data = bytearray(encode_head(MANIFEST))
    data[at : at + len(value)] = value
    refused(reason, decode_head, data)


def test_signatures():
    plain, signed = encode_head(MANIFEST), encode_head(MANIFEST, key=KEY)
    refused(Reason.AUTH, decode_head, plain, key=KEY)
    refused(Reason.AUTH, decode_head, encode_head(MANIFEST, key=b"other"), key=KEY)
    assert decode_head(signed).manifest == MANIFEST, "a reader without a key may read it"


@pytest.mark.parametrize(
    "chunks",
    [(Chunk(1, 9, 0),), (Chunk(0, 0, 0),), (Chunk(0, 5, 0), Chunk(6, 5, 0)), (Chunk(0, -1, 0),)],
    ids=["gap-at-start", "empty", "hole", "negative"],
)
def test_chunks_must_lie_back_to_back(chunks):
    manifest = msgspec.structs.replace(MANIFEST, chunks=chunks)
    try:
        data = encode_head(manifest)
    except struct.error:
        return  # a negative body cannot even be written
    refused(Reason.RANGE, decode_head, data)


def test_a_damaged_body_is_seen():
    head = decode_head(encode_head(MANIFEST))
    damaged = bytearray(BODY)
    damaged[300] ^= 1
    chunks = verified_chunks(head, damaged)
    assert next(chunks) == BODY[:256]
    refused(Reason.CORRUPT, next, chunks)
    refused(Reason.TRUNCATED, next, verified_chunks(head, BODY[:-1]))


def replaced(group, **change):
    part = msgspec.structs.replace(getattr(COMPATIBLE, group), **change)
    return msgspec.structs.replace(COMPATIBLE, **{group: part})


@pytest.mark.parametrize(
    ("own", "reason", "field"),
    [
        (replaced("model", config_hash="dead"), Reason.MODEL, "config_hash"),
        (replaced("model", weights_quantisation="fp8"), Reason.MODEL, "weights_quantisation"),
        (replaced("numerics", kv_dtype="fp8"), Reason.DTYPE, "kv_dtype"),
        (replaced("parallelism", tp_size=2), Reason.TOPOLOGY, "tp_size"),
        (replaced("layout", name="LBNHC"), Reason.LAYOUT, "name"),
        (replaced("layout", block_size=16), Reason.LAYOUT, "block_size"),
        (replaced("layout", block_bytes=4096), Reason.LAYOUT, "block_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_mismatch_has_its_reason_and_names_the_field(own, reason, field):
    assert refused(reason, check_fit, MANIFEST, own, REQUEST).startswith(f"{field}:")


def test_a_model_may_have_another_name():
    check_fit(MANIFEST, replaced("model", name="alias"), REQUEST)


def test_the_request_s_own_tokens_decide():
    check_fit(MANIFEST, COMPATIBLE, REQUEST)
    other = pack_tokens([*range(10), 99, *range(11, 100)])
    refused(Reason.PREFIX, check_fit, MANIFEST, COMPATIBLE, other)
    refused(Reason.PREFIX, check_fit, MANIFEST, COMPATIBLE, REQUEST[: 63 * 4])
    behind_the_blocks = pack_tokens([*range(64), 5000, 5001])
    check_fit(MANIFEST, COMPATIBLE, behind_the_blocks)


def test_blocks_beyond_the_prefix_are_refused():
    manifest = msgspec.structs.replace(MANIFEST, block_ids=(1, 2, 3))
    refused(Reason.RANGE, check_fit, manifest, COMPATIBLE, REQUEST)
