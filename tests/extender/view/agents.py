"""Agents that answer ``/v1/summary`` well or badly, all on one server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from nearkv.node_summary import NodeSummary
from nearkv.serving import Transport, running
from nearkv.settings.address import Address
from tests.extender.view.things import summary

ANY_PORT = Address("127.0.0.1", 0)
HUNDRED_MB = 100 << 20
PLAIN = Transport()


@dataclass
class AgentDouble:
    """One agent; ``trouble`` is what is wrong with it."""

    summary: NodeSummary
    trouble: str = ""
    queries: list[dict[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    sent_bytes: int = 0
    waiting: int = 0

    def change(self, **fields) -> None:
        """Give another summary, the next in the sequence unless told otherwise."""
        fields = {"seq": self.summary.seq + 1, **fields}
        self.summary = msgspec.structs.replace(self.summary, **fields)
        self.tell()

    def tell(self) -> None:
        """Wake who waits."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.headers.append(dict(request.headers))
        if self.trouble:
            return await self._misbehave(request)
        wait_seconds = float(request.query["wait_seconds"])
        if request.query.get("after") == self._cursor() and wait_seconds:
            self.waiting += 1
            try:
                async with asyncio.timeout(wait_seconds):
                    await self.changed.wait()
            except TimeoutError:
                pass
            finally:
                self.waiting -= 1
            if self.trouble:
                return await self._misbehave(request)
        if request.query.get("after") == self._cursor():
            return web.Response(status=304)
        return web.Response(body=msgspec.json.encode(self.summary))

    def _cursor(self) -> str:
        return f"{self.summary.boot}:{self.summary.seq}"

    async def _misbehave(self, request: web.Request) -> web.StreamResponse:
        match self.trouble:
            case "hangs":
                await asyncio.sleep(3600)
            case "breaks":
                request.transport.abort()
                return web.Response()
            case "garbage":
                return web.Response(body=b"<html>busy</html>")
            case "not modified":
                return web.Response(status=304)
            case "huge":
                return await self._pour(request)
            case "zipped":
                response = web.Response(body=b" " * (1 << 20))
                response.enable_compression(web.ContentCoding.gzip)
                return response
            case "redirects":
                raise web.HTTPFound(f"/n2/v1/summary?{request.query_string}")
        return web.Response(status=int(self.trouble))

    async def _pour(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while self.sent_bytes < HUNDRED_MB:
            await response.write(b" " * (1 << 16))
            self.sent_bytes += 1 << 16
        return response


class Agents:
    """Agents by the name of their node."""

    def __init__(self) -> None:
        self.by_node: dict[str, AgentDouble] = {}
        self.base = ""
        self.at_root: AgentDouble | None = None

    def add(self, node: str, **fields) -> AgentDouble:
        """Start an agent."""
        made = self.by_node[node] = AgentDouble(summary(node, **fields))
        return made

    def url(self, node: str) -> str:
        return f"{self.base}/{node}"

    async def answer_at_root(self, request: web.Request) -> web.StreamResponse:
        if self.at_root is None:
            raise web.HTTPNotFound
        return await self.at_root.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await self.by_node[request.match_info["node"]].answer(request)


@asynccontextmanager
async def serving_agents(transport: Transport = PLAIN) -> AsyncIterator[Agents]:
    """Serve agents for the length of a block."""
    agents = Agents()
    app = web.Application()
    app.router.add_get("/{node}/v1/summary", agents.answer)
    app.router.add_get("/v1/summary", agents.answer_at_root)
    async with running(app, ANY_PORT, transport=transport) as address:
        agents.base = address.url if transport.tls is None else f"https://{address}"
        yield agents
        for agent in agents.by_node.values():
            agent.tell()
