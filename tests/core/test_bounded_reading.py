"""Bodies of peers, read with a limit."""

import aiohttp
import pytest
from aiohttp import web

from nearkv.bounded_reading import AnswerTooLargeError, read_at_most
from nearkv.serving import running
from nearkv.settings import Address

BODY = b"x" * 100_000


@pytest.fixture
async def response():
    async def answer(_request):
        return web.Response(body=BODY)

    app = web.Application()
    app.router.add_get("/", answer)
    async with (
        running(app, Address("127.0.0.1", 0)) as address,
        aiohttp.ClientSession() as client,
        client.get(address.url) as response,
    ):
        yield response


async def test_a_body_within_the_limit_is_read_whole(response):
    assert await read_at_most(response, len(BODY)) == BODY


async def test_a_longer_body_is_refused_before_it_is_all_here(response):
    with pytest.raises(AnswerTooLargeError, match="limit of 99999 bytes"):
        await read_at_most(response, len(BODY) - 1)
