"""A thin proxy around Dynamo's selector, run with the peers' environment (no import of ours).

``python peer_dynamo_router.py TOKENIZER BLOCK_TOKENS ENGINE_URL...`` prints its port, then serves.
Dynamo's package has the selector, not an HTTP router that goes without its runtime: so the
selector chooses, by live KV events of the engines, and this passes requests on.
"""

import asyncio
import itertools
import json
import sys
from typing import Any

import aiohttp
from aiohttp import web
from dynamo._core import SelectionService  # type: ignore[import-not-found]
from tokenizers import Tokenizer

_MODEL = "tiny"


class Router:
    """Asks the selector and forwards."""

    def __init__(self, tokenizer: Tokenizer, session: aiohttp.ClientSession) -> None:
        self._tokenizer = tokenizer
        self._session = session
        self._selector = SelectionService(indexer_threads=1)
        self._urls: dict[int, str] = {}
        self._numbers = itertools.count()

    async def add(self, number: int, url: str, block_tokens: int) -> None:
        """Make an engine known; raises where the selector cannot use it."""
        async with self._session.get(f"{url}/kv_event_sources") as answer:
            source = (await answer.json())["0"]
        worker = {
            "worker_id": number,
            "model_name": _MODEL,
            "endpoint": url,
            "block_size": block_tokens,
            "kv_events_endpoint": source["endpoint"].replace("*", "127.0.0.1"),
            "replay_endpoint": source["replay_endpoint"].replace("*", "127.0.0.1"),
            "max_num_batched_tokens": 8192,
        }
        found: Any = await self._selector.upsert_worker(worker)
        if found.get("not_schedulable_reasons"):
            raise RuntimeError(f"{url}: {found['not_schedulable_reasons']}")
        self._urls[number] = url

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass one completion on to the engine that the selector names."""
        body = await request.read()
        tokens = self._tokenizer.encode(json.loads(body)["prompt"]).ids
        name = f"r{next(self._numbers)}"
        asked = {"model_name": _MODEL, "selection_id": name, "token_ids": tokens}
        chosen: Any = await self._selector.select_and_reserve(asked)
        url = self._urls[chosen["worker_id"]]
        try:
            return await self._forward(request, url, body, name)
        finally:
            await self._selector.free_reservation(name)

    async def _forward(
        self, request: web.Request, url: str, body: bytes, name: str
    ) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url + request.path, data=body, headers=headers) as answer:
            passed = web.StreamResponse(status=answer.status)
            passed.content_type = answer.content_type
            await passed.prepare(request)
            first = True
            async for chunk in answer.content.iter_any():
                if first:
                    await self._selector.prefill_complete(name)
                    first = False
                await passed.write(chunk)
            await passed.write_eof()
            return passed


async def main() -> None:
    """Serve until ended."""
    tokenizer, block_tokens, *urls = sys.argv[1:]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        router = Router(Tokenizer.from_file(tokenizer), session)
        for number, url in enumerate(urls, 1):
            await router.add(number, url, int(block_tokens))
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", router.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sys.stdout.write(f"{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
