"""An extender that answers what a test tells it to, well-formed or not."""

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CLOSE = "close the connection"
HANG = "never answer"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: JSON of ``value`` unless ``body`` is given; or a misbehaviour.

    ``packed`` sends it by gzip, ``then`` is called before it is sent.
    """

    value: Any = None
    body: bytes | None = None
    status: int = 200
    instead: str = ""
    packed: bool = False
    then: Callable[[], None] | None = None

    @property
    def content(self) -> bytes:
        """The bytes of the body."""
        body = json.dumps(self.value).encode() if self.body is None else self.body
        return gzip.compress(body) if self.packed else body


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came."""

    verb: str
    body: bytes
    headers: Mapping[str, str]
    raw_headers: Sequence[tuple[bytes, bytes]]
    peer: tuple[str, int]

    @property
    def args(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(slots=True)
class ScriptedExtender:
    """Keeps all nodes and scores them alike until ``answers`` say otherwise, by verb."""

    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def verbs(self) -> list[str]:
        """The verbs called, in order."""
        return [request.verb for request in self.requests]

    def heal(self) -> None:
        """Answer well again."""
        self.answers.clear()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        verb = request.path.rsplit("/", 1)[-1]
        body = await request.read()
        peer = request.transport.get_extra_info("peername") if request.transport else ("", 0)
        seen = Request(verb, body, dict(request.headers), request.raw_headers, peer)
        self.requests.append(seen)
        answer = self.answers.get(verb) or _kindly(seen)
        if answer.instead == HANG:
            await self.released.wait()
        if answer.instead == CLOSE and request.transport is not None:
            request.transport.abort()
        if answer.then is not None:
            answer.then()
        return web.Response(
            body=answer.content,
            status=answer.status,
            content_type="application/json",
            headers={"Content-Encoding": "gzip"} if answer.packed else {},
        )

    @asynccontextmanager
    async def serving(
        self, keepalive_seconds: float = 120.0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator["ScriptedExtender"]:
        """Serve on a free port of loopback inside the block; ``url`` is then its base."""
        server = web.Server(
            self.handle,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=keepalive_seconds,
        )
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
            await site.start()
            self.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            self.released.set()
            await runner.cleanup()


def _kindly(request: Request) -> Answer:
    args = request.args
    names = args.get("NodeNames")
    items = (args.get("Nodes") or {}).get("items") or []
    if request.verb == "filter":
        return Answer({"NodeNames": names, "Nodes": args.get("Nodes")})
    if request.verb == "prioritize":
        hosts = names or [item["metadata"]["name"] for item in items]
        return Answer([{"Host": host, "Score": 5} for host in hosts])
    if request.verb == "preempt":
        return Answer({"NodeNameToMetaVictims": _metas(args)})
    return Answer({"Error": ""})


def _metas(args: Mapping[str, Any]) -> Any:
    if args.get("NodeNameToMetaVictims"):
        return args["NodeNameToMetaVictims"]
    return {
        name: {"Pods": [{"UID": pod["metadata"]["uid"]} for pod in victims["Pods"]]}
        for name, victims in (args.get("NodeNameToVictims") or {}).items()
    }
