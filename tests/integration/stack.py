"""A whole small nearkv in one process: engine doubles, agents, ingress, on loopback."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from nearkv.agent.app import NODE_STATE
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import AgentSettings
from nearkv.ingress.app import KNOWLEDGE
from nearkv.ingress.app import build_app as build_ingress
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.settings import IngressSettings
from nearkv.serving import running
from nearkv.settings import Address, parse_address
from tests.doubles.engine import EngineDouble

ANY_PORT = Address("127.0.0.1", 0)
DEADLINE_SECONDS = 30.0
FAST_AGENT = {
    "listen": "127.0.0.1:0",
    "scrape": {"interval_seconds": 0.1},
    "state": {"heartbeat_seconds": 0.1},
}
LASTING = {"fresh_seconds": 60.0, "aged_seconds": 120.0}
"""Freshness where a machine that stands still for some seconds must not make state aged."""
PATIENT = {"tokenize_seconds": 20.0, "agent_silence_seconds": 20.0}
"""Deadlines of an ingress for what will come, on such a machine as well."""


async def eventually(
    condition: Callable[[], object], *, what: str, seconds: float = DEADLINE_SECONDS
) -> None:
    """Wait until a condition holds; fails with ``what`` when the time is up."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"never came true: {what}"
        await asyncio.sleep(0.005)


@dataclass(slots=True)
class RunningAgent:
    """An agent that serves."""

    url: str
    state: NodeState
    app: web.Application
    engines: dict[str, EngineDouble]

    def is_caught_up(self) -> bool:
        """Tell whether everything the engines published so far is applied and sealed."""
        for tracker in self.state.trackers.values():
            name, _, rank = tracker.identity.id.partition("/dp")
            ranks = self.engines[name].ranks
            publisher = ranks[int(rank or 0)].publisher if ranks else None
            if publisher is not None and tracker.next_wanted < publisher.next_sequence:
                return False
        return not self.state.log.has_pending


@dataclass(slots=True)
class RunningIngress:
    """An ingress that serves, with a client's session."""

    url: str
    knowledge: Knowledge
    session: aiohttp.ClientSession
    stats: dict[str, int] = field(default_factory=dict)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[aiohttp.ClientResponse, Any]:
        """Post JSON and return the response with its decoded body."""
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response, await response.json(content_type=None)

    async def complete(self, prompt: str, **fields: Any) -> tuple[aiohttp.ClientResponse, Any]:
        """Ask for a short completion."""
        headers = fields.pop("headers", None)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return await self.post("/v1/completions", body, headers=headers)

    async def synced(self, agent: RunningAgent) -> None:
        """Wait until everything the agent knows has arrived here."""
        await eventually(
            lambda: (
                agent.is_caught_up()
                and (view := self.knowledge.fleet.agents.get(agent.url)) is not None
                and view.cursor == agent.state.log.cursor
            ),
            what="ingress in step with the agent",
        )


@asynccontextmanager
async def running_agent(
    *engines: EngineDouble, node: str = "n1", names: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[RunningAgent]:
    """Run an agent over these engines, ready and subscribed."""
    configured = [
        {"id": name, "url": engine.url}
        for name, engine in zip(names or tuple("abcdefgh"), engines, strict=False)
    ]
    app = build_agent(
        AgentSettings.model_validate(
            {**FAST_AGENT, "node": node, "engines": configured, **settings}
        )
    )
    listen = parse_address(settings.get("listen", "127.0.0.1:0"))
    async with running(app, listen) as address:
        state = app[NODE_STATE]
        await eventually(
            lambda: (
                len(state.trackers) >= len(engines)
                and all(t.info.state == "ready" for t in state.trackers.values())
            ),
            what="agent knows its engines",
        )
        for engine in engines:
            if engine.config.publish_events:
                await engine.wait_for_subscribers()
        await eventually(
            lambda: all(t.info.events in ("live", "off") for t in state.trackers.values()),
            what="event streams are live",
        )
        yield RunningAgent(
            address.url, state, app, {c["id"]: e for c, e in zip(configured, engines, strict=True)}
        )


@asynccontextmanager
async def running_ingress(*agents: str, **settings: Any) -> AsyncIterator[RunningIngress]:
    """Run an ingress over these agents' URLs."""
    settings = {"freshness": LASTING, **settings}
    settings["deadlines"] = PATIENT | settings.get("deadlines", {})
    app = await build_ingress(
        IngressSettings.model_validate({"listen": "127.0.0.1:0", "agents": agents, **settings})
    )
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(running(app, ANY_PORT))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        knowledge = app[KNOWLEDGE]
        await eventually(
            lambda: (
                sum(a.synced for a in knowledge.fleet.agents.values()) >= len(agents)
                or "sync_seconds" in settings["deadlines"]
            ),
            what="ingress is synced",
        )
        yield RunningIngress(address.url, knowledge, session)


@asynccontextmanager
async def small_fleet(
    *engines: EngineDouble, agent: dict[str, Any] | None = None, **ingress: Any
) -> AsyncIterator[tuple[RunningIngress, RunningAgent]]:
    """Run engines' agent and an ingress in front of them."""
    async with (
        running_agent(*engines, **(agent or {})) as running_one,
        running_ingress(running_one.url, **ingress) as entry,
    ):
        yield entry, running_one
