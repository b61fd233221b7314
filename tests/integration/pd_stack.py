"""A small nearkv whose engines' KV can move: doubles, an agent, a relay, an ingress.

The relay stands between agent and ingress. It says of each engine what the agent of a real
one would (how its KV moves, its role and node), and notes which leases are given back.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from nearkv.serving import running
from nearkv.state.codec import FrameReader, encode_frame
from nearkv.state.model import (
    Delta,
    EngineInfo,
    Frame,
    PathReading,
    SnapshotBegin,
    TransferInfo,
)
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import (
    ANY_PORT,
    RunningAgent,
    RunningIngress,
    eventually,
    running_agent,
    running_ingress,
)

MOVES = TransferInfo(mode="agent", compat="c", kv_bytes_per_token=1000)
SPLIT_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
LEASE_KEYS = {
    "remote_epoch": "epoch-1",
    "remote_lease_id": "lease-1",
    "remote_node": "n1",
    "remote_agent": "http://127.0.0.1:9",
    "unknown": {"kept": [1, None, "\N{LATIN SMALL LETTER E WITH ACUTE}"]},
}
"""What our connector adds to P's parameters, and a key that nobody knows."""


@dataclass(frozen=True, slots=True)
class Part:
    """What the relay says of one engine beyond its agent's word; ``url`` in place of its own."""

    role: str = "both"
    transfer: TransferInfo | None = MOVES
    node: str = "n1"
    url: str | None = None


@dataclass(slots=True)
class Relay:
    """Passes an agent's state on, with its engines' parts filled in."""

    agent_url: str
    parts: Mapping[str, Part]
    paths: Sequence[PathReading] = ()
    released: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    url: str = ""

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Pass the stream of state on."""
        answer = web.StreamResponse()
        await answer.prepare(request)
        reader = FrameReader()
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.agent_url + str(request.rel_url)) as upstream,
        ):
            async for data in upstream.content.iter_any():
                for frame in reader.feed(data):
                    await answer.write(encode_frame(self.filled_in(frame)))
        return answer

    async def release(self, request: web.Request) -> web.Response:
        """Note a lease that is given back."""
        self.tokens.append(request.headers.get("Authorization"))
        self.released.append(await request.json())
        return web.json_response({})

    def filled_in(self, frame: Frame) -> Frame:
        """Return a frame with the engines' parts, and the paths in snapshots."""
        if isinstance(frame, SnapshotBegin | Delta):
            engines = tuple(map(self._filled_in, frame.engines))
            frame = msgspec.structs.replace(frame, engines=engines)
        if isinstance(frame, SnapshotBegin):
            frame = msgspec.structs.replace(frame, paths=tuple(self.paths))
        return frame

    def _filled_in(self, info: EngineInfo) -> EngineInfo:
        part = self.parts[info.id]
        return msgspec.structs.replace(
            info,
            role=part.role,
            transfer=part.transfer,
            node=part.node,
            url=part.url or info.url,
        )


@dataclass(slots=True)
class PdStack:
    """All of it, running."""

    ingress: RunningIngress
    agent: RunningAgent
    relay: Relay
    engines: Mapping[str, EngineDouble]

    async def synced(self) -> None:
        """Wait until all that the engines published so far has arrived at the ingress."""
        await eventually(
            lambda: (
                self.agent.is_caught_up()
                and self.ingress.knowledge.fleet.agents[self.relay.url].cursor
                == self.agent.state.log.cursor
            ),
            what="ingress in step with the agent",
        )

    def legs(self, engine: str) -> list[dict[str, Any]]:
        """Return the generation requests that an engine got, oldest first."""
        return [
            request.as_json()
            for request in self.engines[engine].record
            if request.path in SPLIT_PATHS
        ]

    def bodies(self, engine: str) -> list[bytes]:
        """Return their bodies as they came."""
        return [
            request.body for request in self.engines[engine].record if request.path in SPLIT_PATHS
        ]

    async def counts(self, family: str) -> dict[tuple[str, ...], int]:
        """Return one of the ingress's counters by its label values."""
        async with self.ingress.session.get(self.ingress.url + "/metrics") as answer:
            text = await answer.text()
        found: dict[tuple[str, ...], int] = {}
        for line in text.splitlines():
            name, _, rest = line.replace("} ", " ").replace("{", " ", 1).partition(" ")
            if name == f"nearkv_ingress_{family}_total":
                labels, _, value = rest.rpartition(" ")
                values = (pair.partition("=")[2].strip('"') for pair in labels.split(",") if pair)
                found[tuple(values)] = int(float(value))
        return found


def pd_double(**config: Any) -> EngineDouble:
    """Return an engine double that speaks of leases as our connector does."""
    keys = msgspec.json.encode(LEASE_KEYS).decode()
    settings = {"num_blocks": 600, "max_model_len": 8192, "transfer_keys": keys} | config
    return EngineDouble(EngineDoubleConfig(**settings))


@asynccontextmanager
async def pd_stack(
    parts: Mapping[str, Part],
    *,
    paths: Sequence[PathReading] = (),
    doubles: Mapping[str, EngineDouble] | None = None,
    ingress: Mapping[str, Any] | None = None,
    agent: Mapping[str, Any] | None = None,
    **pd: Any,
) -> AsyncIterator[PdStack]:
    """Run one engine for each part; ``pd`` are settings, by default always splitting."""
    settings = {"mode": "always", "min_tokens": 1, **pd}
    async with AsyncExitStack() as stack:
        engines = {}
        for name in parts:
            double = (doubles or {}).get(name) or pd_double()
            engines[name] = await stack.enter_async_context(double)
        node = await stack.enter_async_context(
            running_agent(*engines.values(), names=tuple(engines), **(agent or {}))
        )
        relay = Relay(node.url, parts, paths)
        app = web.Application()
        app.router.add_get("/v1/state/stream", relay.stream)
        app.router.add_post("/v1/transfer/release", relay.release)
        address = await stack.enter_async_context(running(app, ANY_PORT))
        relay.url = address.url
        entry = await stack.enter_async_context(
            running_ingress(relay.url, pd=settings, **(ingress or {}))
        )
        running_stack = PdStack(entry, node, relay, engines)
        await running_stack.synced()
        yield running_stack


async def until_released(stack: PdStack, count: int = 1) -> None:
    """Wait until so many leases were given back, and make sure that it was no more."""
    await eventually(lambda: len(stack.relay.released) >= count, what="leases given back")
    await asyncio.sleep(0)
    assert len(stack.relay.released) == count
