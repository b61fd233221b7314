"""Event sources of many engines on one node, and consumers of the agent's state, in one process.

An event source is what an agent needs of an engine: its HTTP answers (a captured metrics page)
and its event sockets. What it publishes is encoded beforehand, so that this load takes little of
the machine; each message brings new blocks in two kinds (a prefill's run, decodes' single ones)
and takes as many old ones away.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key, unpack_keys
from nearkv.serving import running
from nearkv.settings import Address
from nearkv.state.codec import FrameReader
from nearkv.state.model import Blocks, Delta
from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.publishing import EventPublisher

MODEL = "m"
_METRICS = Path(__file__).parents[1] / "data" / "vllm" / "metrics.txt"
_BLOCK_TOKENS = 16
_RUN_BLOCKS = 16
_SINGLE_BLOCKS = 9
BLOCKS_PER_MESSAGE = 2 * (_RUN_BLOCKS + _SINGLE_BLOCKS)
"""As many are stored as are removed."""
_ROUND = 200
_LAG = 100
_FILL_BLOCKS = 512


@dataclass(slots=True)
class Message:
    """One encoded batch: its payload, and the key by which a consumer recognizes it."""

    payload: bytes
    first_key: int


class Script:
    """What one engine publishes: a fill, then rounds of messages that follow one another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._root = root_key(KeyNamespace(MODEL))
        self.keys_of: list[list[int]] = []
        stores, handles = [], []
        for _ in range(_ROUND):
            events, made, keys = self._store()
            stores.append(events)
            handles.append(made)
            self.keys_of.append(keys)
        encode = msgspec.msgpack.encode
        self.messages = [
            Message(encode([0.0, [*stores[i], _removed(handles[i - _LAG])], 0]), self.keys_of[i][0])
            for i in range(_ROUND)
        ]
        # What the first messages take away has to be there.
        self.prelude = [encode([0.0, stores[i - _LAG], 0]) for i in range(_LAG)]

    def fill(self, blocks: int) -> Iterator[bytes]:
        """Yield messages that bring blocks which stay."""
        for _ in range(blocks // _FILL_BLOCKS):
            tokens = self._tokens(_FILL_BLOCKS)
            yield msgspec.msgpack.encode(
                [0.0, [_stored(self._handles(_FILL_BLOCKS), None, tokens)], 0]
            )

    def held_after(self, count: int) -> set[int]:
        """Return the keys of the blocks held after so many messages, the fill left out."""
        return {key for i in range(count - _LAG, count) for key in self.keys_of[i % _ROUND]}

    def _store(self) -> tuple[list[dict[str, object]], list[int], list[int]]:
        run = self._handles(_RUN_BLOCKS)
        tokens = self._tokens(_RUN_BLOCKS)
        events = [_stored(run, None, tokens)]
        keys = chain_keys(self._root, pack_tokens(tokens), _BLOCK_TOKENS)
        handles = list(run)
        for _ in range(_SINGLE_BLOCKS):
            (handle,), tokens = self._handles(1), self._tokens(1)
            events.append(_stored([handle], run[-1], tokens))
            keys += chain_keys(keys[_RUN_BLOCKS - 1], pack_tokens(tokens), _BLOCK_TOKENS)
            handles.append(handle)
        return events, handles, keys

    def _handles(self, count: int) -> list[int]:
        return [self._random.getrandbits(64) for _ in range(count)]

    def _tokens(self, blocks: int) -> list[int]:
        return [self._random.randrange(128_000) for _ in range(blocks * _BLOCK_TOKENS)]


def _stored(handles: list[int], parent: int | None, tokens: list[int]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": handles,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": _BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(handles),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removed(handles: list[int]) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": handles[::-1], "medium": "GPU", "group_idx": 0}


class Source(EventPublisher):
    """One engine's event sockets, for batches that are encoded already."""

    def send(self, payload: bytes) -> None:
        """Number a batch and send it; a full queue would be a loss, so it fails."""
        sequence = self._next_sequence
        self._next_sequence += 1
        self._buffer.append((sequence, payload))
        self._live.send_multipart([b"", sequence.to_bytes(8, "big"), payload], flags=1)


@dataclass(slots=True)
class Engine:
    """One engine as the agent sees it."""

    name: str
    url: str
    source: Source
    script: Script
    sent: int = 0

    def send_next(self, sent_at: dict[int, float]) -> None:
        """Publish the next message, and note when."""
        message = self.script.messages[self.sent % _ROUND]
        sent_at[message.first_key] = time.perf_counter()
        self.source.send(message.payload)
        self.sent += 1


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[Engine]]:
    """Serve so many engines."""
    async with AsyncExitStack() as stack:
        made = []
        for i in range(count):
            source = Source(EngineDoubleConfig(), rank=0)
            await source.start(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
            stack.callback(source.stop)
            address = await stack.enter_async_context(
                running(_engine_app(source), Address("127.0.0.1", 0))
            )
            made.append(Engine(f"e{i}", address.url, source, Script(i)))
        yield made


def _engine_app(source: Source) -> web.Application:
    metrics = _METRICS.read_bytes()
    addresses = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
    answers: dict[str, object] = {
        "/v1/models": {"data": [{"id": MODEL, "max_model_len": 8192}]},
        "/version": {"version": "0.33.0"},
        "/kv_event_sources": {"0": {**addresses, "topic": "", "enable_kv_cache_events": True}},
    }

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(body=metrics, content_type="text/plain")
        return web.json_response(answers[request.path])

    app = web.Application()
    for path in (*answers, "/metrics"):
        app.router.add_get(path, answer)
    return app


@dataclass(slots=True)
class Consumer:
    """Follows the agent's state, and keeps what it says."""

    sent_at: dict[int, float]
    held: dict[str, set[int]] = field(default_factory=dict)
    latencies_seconds: list[float] = field(default_factory=list)
    added: int = 0
    removed: int = 0
    deltas: int = 0
    bytes_read: int = 0
    snapshots: int = 0

    async def follow(self, url: str) -> None:
        """Follow until cancelled."""
        reader = FrameReader()
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session,
            session.get(url + "/v1/state/stream", raise_for_status=True) as response,
        ):
            async for data in response.content.iter_any():
                self.bytes_read += len(data)
                for frame in reader.feed(data):
                    if isinstance(frame, Delta):
                        self._apply(frame)
                    elif isinstance(frame, Blocks):
                        self.held.setdefault(frame.engine, set()).update(unpack_keys(frame.keys))
                    elif type(frame).__name__ == "SnapshotBegin":
                        self.snapshots += 1
                        self.held.clear()

    def _apply(self, delta: Delta) -> None:
        now = time.perf_counter()
        self.deltas += 1
        for change in delta.blocks:
            held = self.held.setdefault(change.engine, set())
            if change.cleared:
                held.clear()
            removed, added = unpack_keys(change.removed), unpack_keys(change.added)
            held.difference_update(removed)
            held.update(added)
            self.removed += len(removed)
            self.added += len(added)
            for key in self.sent_at.keys() & set(added):
                self.latencies_seconds.append(now - self.sent_at[key])


async def publish(
    sources: list[Engine], sent_at: dict[int, float], *, per_second: float, seconds: float
) -> float:
    """Publish at a steady rate, the engines in turn; returns the rate that was reached."""
    began = time.perf_counter()
    count = round(per_second * seconds / BLOCKS_PER_MESSAGE)
    for i in range(count):
        due = began + i * BLOCKS_PER_MESSAGE / per_second
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        elif i % 50 == 0:
            await asyncio.sleep(0)
        sources[i % len(sources)].send_next(sent_at)
    return count * BLOCKS_PER_MESSAGE / (time.perf_counter() - began)
