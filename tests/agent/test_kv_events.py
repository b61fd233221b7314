"""Decoding of KV events: both encodings, every version's extras, and nonsense."""

import base64
import json
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkv.agent.block_table import BlockChanges, BlockTable
from nearkv.agent.errors import EventDecodeError
from nearkv.agent.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
)

CAPTURED = Path(__file__).parents[1] / "data/vllm/kv_events.jsonl"
TOKENS = [1, 2, 3, 4]
STORED = BlockStored([11, 12], 10, TOKENS, 2)


def pack(*events, dp_rank=0):
    return msgspec.msgpack.encode([1.5, list(events), dp_rank])


def decode(*events):
    return decode_batch(pack(*events)).events


def stored(**fields):
    plain = {"block_hashes": [11, 12], "parent_block_hash": 10, "token_ids": TOKENS}
    return {"type": "BlockStored", **plain, "block_size": 2, **fields}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(["BlockStored", [11, 12], 10, TOKENS, 2], STORED, id="array-shortest"),
        pytest.param(
            ["BlockStored", [11, 12], 10, TOKENS, 2, None, "GPU"], STORED, id="array-0.11"
        ),
        pytest.param(
            ["BlockStored", [11, 12], 10, TOKENS, 2, None, "CPU", "sql", [["s"], None]],
            BlockStored([11, 12], 10, TOKENS, 2, "CPU", "sql", [["s"], None]),
            id="array-0.19",
        ),
        pytest.param(
            ["BlockStored", [11, 12], 10, TOKENS, 2, 3, "GPU", None, None, 1, "mla_attention", 9],
            BlockStored([11, 12], 10, TOKENS, 2, "GPU", "#3", None, 1),
            id="array-0.23",
        ),
        pytest.param(
            ["BlockStored", [11, 12], 10, TOKENS, 2, *[None] * 6, "later", {"a": 1}],
            STORED,
            id="array-extra-positions",
        ),
        pytest.param(stored(), STORED, id="map"),
        pytest.param(stored(later={"a": [1]}, ownership=None), STORED, id="map-unknown-fields"),
        pytest.param(stored(extra_keys=[None, None]), STORED, id="map-no-extra-keys"),
        pytest.param(
            stored(lora_id=3, lora_name="sql", group_idx=2, medium="STORAGE"),
            BlockStored([11, 12], 10, TOKENS, 2, "STORAGE", "sql", None, 2),
            id="map-lora-group-medium",
        ),
        pytest.param(
            stored(block_hashes=[b"\x01" * 32, b""], parent_block_hash=b"\xff"),
            BlockStored([b"\x01" * 32, b""], b"\xff", TOKENS, 2),
            id="map-bytes-hashes",
        ),
        pytest.param(
            stored(block_hashes=[2**64 - 1, -(2**63)]),
            BlockStored([2**64 - 1, -(2**63)], 10, TOKENS, 2),
            id="map-widest-integers",
        ),
        pytest.param(
            stored(token_ids=[], block_size=0, parent_block_hash=None, medium="CPU"),
            BlockStored([11, 12], None, [], 0, "CPU"),
            id="map-tier-gained-0.32",
        ),
        pytest.param(["BlockRemoved", [11]], BlockRemoved([11]), id="removed-array-shortest"),
        pytest.param(
            ["BlockRemoved", [11], "CPU", 1, "x"], BlockRemoved([11], "CPU", 1), id="removed-array"
        ),
        pytest.param(
            {"type": "BlockRemoved", "block_hashes": [b"h"], "medium": None, "locality": "x"},
            BlockRemoved([b"h"]),
            id="removed-map",
        ),
        pytest.param(["AllBlocksCleared"], AllBlocksCleared(), id="cleared-array"),
        pytest.param({"type": "AllBlocksCleared"}, AllBlocksCleared(), id="cleared-map"),
    ],
)
def test_golden_events(raw, expected):
    assert decode(raw) == [expected]


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_kinds_that_prove_a_prefix_are_used(kind):
    assert decode(stored(kv_cache_spec_kind=kind)) == [STORED]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(stored(kv_cache_spec_kind="sliding_window"), "not_reusable_kind", id="window"),
        pytest.param(stored(kv_cache_spec_kind="invented"), "not_reusable_kind", id="new-kind"),
        pytest.param(stored(kv_cache_spec_kind=["x"]), "not_reusable_kind", id="kind-no-text"),
        pytest.param(["BlockExploded", 1], "unknown_tag", id="unknown-array-tag"),
        pytest.param({"type": "BlockExploded"}, "unknown_tag", id="unknown-map-tag"),
        pytest.param({"kind": "BlockStored"}, "unknown_tag", id="no-tag"),
        pytest.param([[1]], "unknown_tag", id="tag-no-text"),
        pytest.param([], "malformed", id="empty-array"),
        pytest.param(7, "malformed", id="a-number"),
        pytest.param(None, "malformed", id="nil"),
        pytest.param(["BlockStored"], "malformed", id="no-fields"),
        pytest.param(["BlockRemoved"], "malformed", id="removed-no-fields"),
        pytest.param(stored(block_hashes=11), "malformed", id="hashes-no-list"),
        pytest.param(stored(block_hashes=["a", "b"]), "malformed", id="hashes-are-text"),
        pytest.param(stored(block_hashes=[1.0, 2.0]), "malformed", id="hashes-are-floats"),
        pytest.param(stored(token_ids=None), "malformed", id="no-tokens"),
        pytest.param(stored(block_size="2"), "malformed", id="block-size-is-text"),
        pytest.param(stored(parent_block_hash="p"), "malformed", id="parent-is-text"),
        pytest.param(stored(medium=5), "malformed", id="medium-is-a-number"),
        pytest.param(stored(medium=["GPU"]), "malformed", id="medium-is-a-list"),
        pytest.param(stored(group_idx="a"), "malformed", id="group-is-text"),
        pytest.param(["BlockRemoved", [11], {"a": 1}], "malformed", id="removed-medium-is-a-map"),
        pytest.param(stored(block_size=0), "token_count", id="block-size-zero"),
        pytest.param(stored(token_ids=[1, 2, 3]), "token_count", id="too-few-tokens"),
        pytest.param(stored(block_hashes=[]), "token_count", id="tokens-without-hashes"),
    ],
)
def test_what_cannot_be_used_is_counted_and_the_rest_is_kept(raw, reason):
    batch = decode_batch(pack(raw, stored(), raw))
    assert batch.events == [STORED]
    assert batch.skipped == {reason: 2}


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="no-msgpack"),
        pytest.param(b"\x91" * 100_000, id="nested-too-deep"),
        pytest.param(b"\x93\x01\x90\xa1\xff", id="bad-utf8"),
        pytest.param(b"\x93\x01\x91\x81\x80\x01\x00", id="map-as-a-map-key"),
        pytest.param(pack(stored())[:-1], id="cut-off"),
        pytest.param(pack(stored()) + b"\x00", id="bytes-left-over"),
        pytest.param(msgspec.msgpack.encode({"ts": 1}), id="a-map"),
        pytest.param(msgspec.msgpack.encode([1.0]), id="too-short"),
        pytest.param(msgspec.msgpack.encode(["now", []]), id="timestamp-is-text"),
        pytest.param(msgspec.msgpack.encode([1.0, {"a": 1}]), id="events-are-a-map"),
    ],
)
def test_a_payload_that_is_no_batch_is_refused(payload):
    with pytest.raises(EventDecodeError):
        decode_batch(payload)


@pytest.mark.parametrize(
    ("raw", "dp_rank"),
    [([1, []], None), ([1, [], None], None), ([1.5, [], 3], 3), ([1.5, [], 0, "later"], 0)],
)
def test_the_rank_may_be_absent(raw, dp_rank):
    batch = decode_batch(msgspec.msgpack.encode(raw))
    assert (batch.events, batch.dp_rank, batch.skipped) == ([], dp_rank, {})


def captured():
    for line in CAPTURED.read_text().splitlines():
        message = json.loads(line)
        payload = base64.b64decode(message["payload_base64"])
        yield message["decoded"], payload


def test_every_captured_message_is_read_as_its_engine_meant_it():
    for decoded, payload in captured():
        batch = decode_batch(payload)
        assert batch.skipped == {}
        assert batch.dp_rank == decoded[2]
        assert [getattr(event, "handles", None) for event in batch.events] == [
            raw.get("block_hashes") for raw in decoded[1]
        ]
        assert [len(getattr(event, "token_ids", [])) for event in batch.events] == [
            len(raw.get("token_ids", [])) for raw in decoded[1]
        ]


def test_captured_messages_say_the_same_in_the_old_encoding():
    names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
    names += ["lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"]
    fields = {"BlockStored": names, "BlockRemoved": ["block_hashes", "medium", "group_idx"]}
    for decoded, payload in captured():
        old = [
            [raw["type"], *(raw.get(name) for name in fields.get(raw["type"], []))]
            for raw in decoded[1]
        ]
        assert decode(*old) == decode_batch(payload).events


@given(st.binary(max_size=100))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_else(data):
    with suppress(EventDecodeError):
        decode_batch(data)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
plausible = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])},
    optional={
        "block_hashes": st.lists(st.integers(0, 3) | st.binary(max_size=1), max_size=3) | junk,
        "parent_block_hash": st.none() | st.integers(0, 3) | junk,
        "token_ids": st.lists(st.integers(0, 9), max_size=3) | junk,
        "block_size": st.integers(0, 2) | junk,
        "medium": st.sampled_from(["GPU", "CPU"]) | junk,
        "lora_name": junk,
        "extra_keys": st.lists(junk, max_size=3) | junk,
        "group_idx": st.integers(0, 1) | junk,
        "kv_cache_spec_kind": st.just("full_attention") | junk,
    },
)


@given(st.lists(plausible | junk, max_size=5))
@settings(max_examples=300, deadline=None)
def test_plausible_nonsense_harms_neither_decoder_nor_table(raw_events):
    batch = decode_batch(pack(*raw_events))
    assert len(batch.events) + sum(batch.skipped.values()) == len(raw_events)
    table = BlockTable(key_model="m")
    table.apply(batch.events, BlockChanges())
    assert all(isinstance(tier, str) for tier in table.keys_by_tier())


@pytest.mark.parametrize(
    "fields",
    [{"block_size": True, "token_ids": [1, 2]}, {"medium": "m" * 65}, {"block_size": 2.0}],
    ids=["true-is-no-size", "endless-tier", "fraction"],
)
def test_what_consumers_of_the_state_could_not_read_is_passed_over(fields):
    batch = decode_batch(pack(stored(**fields), stored()))
    assert (batch.events, batch.skipped) == ([STORED], {"malformed": 1})
