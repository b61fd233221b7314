"""Asking engines for token ids: over HTTP, with deadlines, and wary of the answers."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from nearkv.ingress.errors import TokenizationError
from nearkv.ingress.tokens.engine_tokenizer import EngineRef, EngineTokenizer
from nearkv.serving import running
from nearkv.settings import Address

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Answering:
    """A server that gives one answer to everything and keeps what it was asked."""

    def __init__(self):
        self.status = 200
        self.body = b"{}"
        self.asked = []
        self.silent = asyncio.Event()
        self.silent.set()

    async def handle(self, request):
        self.asked.append((request.path, await request.json(), request.headers))
        await self.silent.wait()
        return web.Response(status=self.status, body=self.body)


@pytest.fixture
async def server():
    return Answering()


@pytest.fixture
async def engine(server):
    app = web.Application(client_max_size=4 << 20)
    app.router.add_post("/{path:.*}", server.handle)
    async with running(app, Address("127.0.0.1", 0)) as address:
        yield EngineRef("e", "i", address.url)
        server.silent.set()


@pytest.fixture
async def tokenizer():
    async with aiohttp.ClientSession() as session:
        yield EngineTokenizer(session, timeout_seconds=5.0, api_key="secret")


async def test_a_chat_is_rendered_as_an_object(server, engine, tokenizer):
    server.body = b'{"token_ids": [1, 2], "features": null}'
    assert (await tokenizer.render(engine, CHATS, b"{}")).token_ids == [1, 2]
    ((path, _, headers),) = server.asked
    assert path == f"{CHATS}/render"
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("size_bytes", [1 << 20, (1 << 20) + 1, 3 << 20])
async def test_a_large_prompt_arrives_whole(server, engine, tokenizer, size_bytes):
    server.body = b'{"token_ids": [1], "features": null}'
    body = b'{"a":"' + b"x" * (size_bytes - 8) + b'"}'
    await tokenizer.render(engine, CHATS, body)
    ((_, asked, headers),) = server.asked
    assert len(asked["a"]) == size_bytes - 8
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == str(size_bytes)


async def test_a_completion_is_rendered_as_a_list(server, engine, tokenizer):
    server.body = b'[{"token_ids": [1, 2]}, {"token_ids": [3]}]'
    assert (await tokenizer.render(engine, COMPLETIONS, b"{}")).token_ids == [1, 2]


async def test_spelling_is_asked_for_only_where_it_is_needed(server, engine, tokenizer):
    server.body = b'{"count": 1, "tokens": [1], "token_strs": ["a"]}'
    found = await tokenizer.tokenize(engine, {"prompt": "a"}, spelled=True)
    assert (found.token_ids, found.token_strs) == ([1], ["a"])
    server.body = b'{"tokens": [1], "token_strs": null}'
    assert (await tokenizer.tokenize(engine, {"prompt": "a"})).token_strs is None
    assert [body for _, body, _ in server.asked] == [
        {"prompt": "a", "return_token_strs": True},
        {"prompt": "a"},
    ]


@pytest.mark.parametrize(
    ("status", "offered"),
    [(403, False), (404, False), (405, False), (501, False), (400, True), (429, True), (500, True)],
)
async def test_what_is_declined_is_remembered_and_what_failed_is_not(
    server, engine, tokenizer, status, offered
):
    server.status = status
    with pytest.raises(TokenizationError) as failed:
        await tokenizer.render(engine, CHATS, b"{}")
    assert not failed.value.unreachable
    assert tokenizer.offers(engine, f"{CHATS}/render") is offered
    assert tokenizer.offers(engine, "/tokenize")
    assert tokenizer.offers(EngineRef("e", "i2", engine.url), f"{CHATS}/render")


async def test_what_was_declined_is_forgotten_with_the_engine(server, engine, tokenizer):
    server.status = 404
    with pytest.raises(TokenizationError):
        await tokenizer.tokenize(engine, {})
    tokenizer.forget({("e", "i")})
    assert not tokenizer.offers(engine, "/tokenize")
    tokenizer.forget(set())
    assert tokenizer.offers(engine, "/tokenize")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff",
        b"{}",
        b'{"tokens": "x", "token_ids": 5}',
        b'{"tokens": [-1], "token_ids": [-1]}',
        b'{"tokens": [4294967296], "token_ids": [4294967296]}',
        b'{"tokens": [1.5], "token_ids": [1.5]}',
    ],
    ids=["empty", "text", "bytes", "no tokens", "types", "negative", "too large", "halves"],
)
async def test_a_nonsense_answer_is_no_tokens(server, engine, tokenizer, body):
    server.body = body
    with pytest.raises(TokenizationError, match="unexpected answer"):
        await tokenizer.tokenize(engine, {})
    with pytest.raises(TokenizationError, match="unexpected answer"):
        await tokenizer.render(engine, CHATS, b"{}")


async def test_a_completion_rendered_to_nothing_is_no_tokens(server, engine, tokenizer):
    server.body = b"[]"
    with pytest.raises(TokenizationError):
        await tokenizer.render(engine, COMPLETIONS, b"{}")


async def test_a_silent_engine_is_waited_for_no_longer_than_the_deadline(server, engine):
    server.silent.clear()
    async with aiohttp.ClientSession() as session:
        impatient = EngineTokenizer(session, timeout_seconds=0.05, api_key=None)
        async with asyncio.timeout(30):
            with pytest.raises(TokenizationError, match="TimeoutError"):
                await impatient.tokenize(engine, {})
    server.silent.set()


async def test_an_engine_that_is_not_there_is_no_tokens(tokenizer, unused_port):
    nobody = EngineRef("e", "i", f"http://127.0.0.1:{unused_port}")
    with pytest.raises(TokenizationError) as failed:
        await tokenizer.tokenize(nobody, {})
    assert failed.value.unreachable
    assert tokenizer.offers(nobody, "/tokenize")


@pytest.fixture
async def unused_port():
    async with running(web.Application(), Address("127.0.0.1", 0)) as address:
        return address.port
