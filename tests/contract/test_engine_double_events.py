"""The double's KV events equal the captured ones in structure, order and framing."""

import aiohttp
import msgspec
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.doubles.engine.captured import (
    CAPTURED_CONFIG,
    captured_events,
    captured_exchanges,
    captured_replay,
)
from tests.doubles.engine.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventEncoding,
)
from tests.doubles.engine.subscribing import EventReader

END = (-1).to_bytes(8, "big", signed=True)
BLOCK = 32


class HashNames:
    """Names hashes by order of first sight, so that different hash values compare equal."""

    def __init__(self):
        self._names = {}

    def name(self, value):
        return None if value is None else self._names.setdefault(value, len(self._names))

    def rename(self, event):
        renamed = dict(event)
        if "block_hashes" in event:
            renamed["block_hashes"] = [self.name(value) for value in event["block_hashes"]]
        if "parent_block_hash" in event:
            renamed["parent_block_hash"] = self.name(event["parent_block_hash"])
        return renamed


def structure(batches):
    names = HashNames()
    return [[(list(e), names.rename(e)) for e in events] for events in batches]


async def complete(engine, tokens, **body):
    """Serve token ids, by default producing a single token that fills no block."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            engine.url + "/v1/completions", json={"prompt": tokens, "max_tokens": 1} | body
        ) as response,
    ):
        assert response.status == 200, await response.text()
        return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(start, blocks):
    return list(range(start, start + BLOCK * blocks + 1))


async def test_events_and_replay_equal_the_capture():
    wanted = captured_events()
    asked, wanted_replies = captured_replay()
    async with EngineDouble(CAPTURED_CONFIG) as engine, EventReader(engine) as reader:
        async with aiohttp.ClientSession() as session:
            for exchange in captured_exchanges():
                body = {} if exchange.request is None else {"json": exchange.request}
                async with session.request(
                    exchange.method, engine.url + exchange.path, **body
                ) as response:
                    await response.read()
        messages = [await reader.frames() for _ in wanted]
        replies = await reader.replay(asked)

    payloads = [msgspec.msgpack.decode(payload) for _, _, payload in messages]
    assert [m[0].decode() for m in messages] == [frame.topic for frame in wanted]
    assert [int.from_bytes(m[1], "big") for m in messages] == [frame.seq for frame in wanted]
    assert structure(p[1] for p in payloads) == structure(f.decoded[1] for f in wanted)
    assert [(len(p), p[2]) for p in payloads] == [(3, 0)] * len(wanted)
    assert [r[:-1] for r in replies] == [r[:-1] for r in wanted_replies]
    assert [r[-1] for r in replies] == [m[2] for m in messages[asked:]] + [b""]


EVENTS = [
    BlockRemoved(hashes=(7,)),
    AllBlocksCleared(),
    BlockStored((1, 2), 3, [4, 5], 1, "GPU", 1, "sql", [["sql"], None]),
    BlockStored((2**64 - 1,), None, [], 0, medium="CPU", group_idx=None, kind=None),
]
STORED_FIELDS = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
]
REMOVED_FIELDS = ["block_hashes", "medium", "group_idx"]


def as_map(packed):
    tag, *values = packed
    names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(tag, [])
    return {"type": tag, **dict(zip(names, values, strict=True))}


def without_nulls(event):
    return {key: value for key, value in event.items() if value is not None}


def test_both_encodings_carry_the_same_content():
    decoded = {
        form: msgspec.msgpack.decode(
            EventEncoding(form).encode_batch(EVENTS, timestamp=1.5, rank=2)
        )
        for form in ("map", "array")
    }
    assert decoded["map"][::2] == decoded["array"][::2] == [1.5, 2]
    arrays = [without_nulls(as_map(packed)) for packed in decoded["array"][1]]
    assert arrays == [without_nulls(event) for event in decoded["map"][1]]


def test_raw_hashes_end_in_the_integer_form():
    payload = EventEncoding("map", "bytes").encode_batch(EVENTS, timestamp=0, rank=0)
    removed = msgspec.msgpack.decode(payload)[1][0]["block_hashes"]
    assert [(len(raw), int.from_bytes(raw[-8:], "big")) for raw in removed] == [(32, 7)]


async def test_dropped_batches_leave_a_gap_that_replay_fills():
    async with EngineDouble() as engine, EventReader(engine) as reader:
        await complete(engine, tokens(0, 1))
        await engine.inject(Faults(drop_event_batches=2))
        for start in (100, 200, 300):
            await complete(engine, tokens(start, 1))
        assert [sequence for sequence, _ in await reader.batches(2)] == [0, 3]
        replies = await reader.replay(1)
    assert [int.from_bytes(reply[-2], "big") for reply in replies[:-1]] == [1, 2, 3]


async def test_garbage_batch_is_intact_in_replay():
    async with EngineDouble() as engine, EventReader(engine) as reader:
        await engine.inject(Faults(garbage_event_batches=1))
        await complete(engine, tokens(0, 1))
        _, _, payload = await reader.frames()
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(payload)
        replies = await reader.replay(0)
    assert msgspec.msgpack.decode(replies[0][-1])[1][0]["type"] == "BlockStored"


@pytest.mark.parametrize(
    ("framing", "frames", "end"),
    [
        pytest.param("topic", 4, [b"", b"", END, b""], id="topic"),
        pytest.param("plain", 3, [b"", END, b""], id="plain"),
    ],
)
async def test_replay_framing(framing, frames, end):
    config = EngineDoubleConfig(replay_framing=framing, topic="t", buffer_steps=2)
    async with EngineDouble(config) as engine, EventReader(engine) as reader:
        for start in (0, 100, 200):
            await complete(engine, tokens(start, 1))
        replies = await reader.replay(0)
    assert replies[-1] == end
    # The buffer holds two steps, so the replay begins later than asked.
    assert [int.from_bytes(reply[-2], "big") for reply in replies[:-1]] == [1, 2]
    assert {len(reply) for reply in replies} == {frames}


async def test_restart_begins_again_on_the_same_ports():
    async with EngineDouble() as engine, EventReader(engine) as reader:
        before = (engine.url, engine.kv_events_endpoint, engine.kv_replay_endpoint)
        await complete(engine, tokens(0, 2))
        assert await complete(engine, tokens(0, 2)) == 2 * BLOCK
        assert (await reader.batch())[0] == 0
        await engine.restart()
        assert (engine.url, engine.kv_events_endpoint, engine.kv_replay_endpoint) == before
        await engine.wait_for_subscribers()
        assert await complete(engine, tokens(0, 2)) == 0
        assert (await reader.batch())[0] == 0


async def test_clear_leaves_with_the_next_batch():
    async with EngineDouble() as engine, EventReader(engine, timeout_seconds=5) as reader:
        await complete(engine, tokens(0, 1))
        async with (
            aiohttp.ClientSession() as session,
            session.post(engine.url + "/reset_prefix_cache") as response,
        ):
            assert await response.json() == {"success": True}
        await complete(engine, tokens(100, 1))
        batches = await reader.batches(2)
    kinds = [[event["type"] for event in events] for _, events in batches]
    assert kinds == [["BlockStored"], ["AllBlocksCleared", "BlockStored"]]


async def test_generated_blocks_are_announced_in_their_own_batch():
    async with EngineDouble() as engine, EventReader(engine) as reader:
        await complete(engine, tokens(0, 1), max_tokens=2 * BLOCK)
        (_, prompt), (_, first) = await reader.batches(2)
    assert first[0]["parent_block_hash"] == prompt[0]["block_hashes"][0]
    assert len(first[0]["token_ids"]) == BLOCK


async def test_each_rank_has_its_own_cache_and_numbers():
    async with (
        EngineDouble(EngineDoubleConfig(dp_size=2)) as engine,
        EventReader(engine, rank=1) as reader,
        aiohttp.ClientSession(headers={"X-data-parallel-rank": "1"}) as session,
    ):
        await complete(engine, tokens(0, 1))
        async with session.post(
            engine.url + "/v1/completions", json={"prompt": tokens(0, 1)}
        ) as response:
            usage = (await response.json())["usage"]
        _, _, payload = await reader.frames()
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert msgspec.msgpack.decode(payload)[2] == 1
    assert len(set(engine.kv_events_endpoints + engine.kv_replay_endpoints)) == 4


async def test_rank_out_of_range_is_refused():
    async with (
        EngineDouble(EngineDoubleConfig(dp_size=2)) as engine,
        aiohttp.ClientSession(headers={"X-data-parallel-rank": "2"}) as session,
        session.post(engine.url + "/v1/completions", json={"prompt": "x"}) as response,
    ):
        assert response.status == 400
