"""The floor to measure against: an aiohttp pass-through with no parsing and no policy."""

import asyncio
import sys
from itertools import cycle

import aiohttp
from aiohttp import web

from nearkv.serving import run, running
from nearkv.settings import Address


async def _serve(urls: list[str]) -> None:
    targets = cycle(urls)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
    ) as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            async with session.post(
                next(targets) + request.path,
                data=body,
                headers={"Content-Type": request.headers["Content-Type"]},
            ) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )

        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/{tail:.*}", forward)
        async with running(app, Address("127.0.0.1", 0)) as address:
            sys.stdout.write(address.url + "\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    run(_serve(sys.argv[1:]))
