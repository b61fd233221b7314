"""Asking engines, over a real server: what is sent, and what becomes of odd answers."""

from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from nearkv.agent.warming.calling import EngineAddress, EngineCaller, Loaded
from nearkv.agent.warming.errors import LoadError
from nearkv.agent.warming.requests import WarmRequest
from nearkv.serving import running
from nearkv.settings import Address

REQUEST = WarmRequest(prompt="a long document")
USAGE = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
NO_PRIORITY = {"error": {"message": "Got priority 100 but Priority scheduling is not enabled."}}


class Engine:
    """A server that gives its answers in turn, and keeps what it was sent."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []

    async def answer(self, request):
        self.seen.append((request.path, dict(request.headers), await request.json()))
        status, body = self.answers.pop(0)
        body = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return web.Response(status=status, body=body, headers={"Location": "/elsewhere"})

    @asynccontextmanager
    async def called(self, **address):
        app = web.Application()
        app.router.add_post("/{path:.*}", self.answer)
        async with (
            running(app, Address("127.0.0.1", 0)) as listening,
            aiohttp.ClientSession() as session,
        ):
            caller = EngineCaller(deadline_seconds=10.0, priority=100)
            caller.session = session
            yield caller, EngineAddress(listening.url, "tiny", **address)


async def test_a_load_goes_with_the_key_the_rank_and_the_priority():
    engine = Engine((200, USAGE))
    async with engine.called(api_key="secret-key", rank=3) as (caller, address):
        assert await caller.load(address, REQUEST, [1, 2, 3]) == Loaded(9, 4)
        assert "secret-key" not in repr(address)
    ((path, headers, body),) = engine.seen
    assert (path, body["prompt"], body["priority"]) == ("/v1/completions", [1, 2, 3], 100)
    assert (headers["Authorization"], headers["X-data-parallel-rank"]) == ("Bearer secret-key", "3")


async def test_an_engine_that_refuses_a_priority_is_asked_once_more_without():
    engine = Engine((400, NO_PRIORITY), (200, USAGE))
    async with engine.called() as (caller, address):
        await caller.load(address, REQUEST, None)
    assert [body.get("priority") for _, _, body in engine.seen] == [100, None]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((400, {"error": "the prompt is too long"}), "refused"),
        ((500, b"priority queue broken"), "refused"),
        ((302, b""), "refused"),
        ((200, b"<html>"), "unreadable"),
        ((200, b'{"usage": {"prompt_tokens": -1e999}}'), "unreadable"),
        ((200, b'{"more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "unreadable"),
    ],
    ids=["bad-request", "broken", "redirect", "no-json", "no-number", "deep"],
)
async def test_what_goes_wrong_has_a_name_and_is_not_tried_again(answer, reason):
    engine = Engine(answer)
    async with engine.called() as (caller, address):
        with pytest.raises(LoadError) as caught:
            await caller.load(address, REQUEST, None)
    assert (caught.value.reason, len(engine.seen)) == (reason, 1)


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [((200, {"tokens": [1, 2]}), [1, 2]), ((404, b""), None), ((403, b""), None)],
)
async def test_tokens_are_those_of_the_engine_where_it_tells_them(answer, tokens):
    async with Engine(answer).called() as (caller, address):
        assert await caller.tokenize(address, REQUEST) == tokens


async def test_tokens_without_end_are_not_kept():
    endless = b'{"tokens": [' + b"1," * (4 << 20) + b"1]}"
    async with Engine((200, endless)).called() as (caller, address):
        with pytest.raises(LoadError) as caught:
            await caller.tokenize(address, REQUEST)
    assert caught.value.reason == "unreadable"


async def test_tokens_that_were_given_are_not_asked_for():
    engine = Engine()
    async with engine.called() as (caller, address):
        assert await caller.tokenize(address, WarmRequest(token_ids=[7])) == [7]
