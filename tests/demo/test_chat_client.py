import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from nearkv.demo.chat_client import ask
from nearkv.demo.errors import ScenarioError

HEADERS = {
    "x-nearkv-engine": "engine-a",
    "x-nearkv-reason": "prefix-hit",
    "x-nearkv-predicted-cached-tokens": "64",
}
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
TEXT = {"choices": [{"index": 0, "delta": {"content": "forty-"}}], "usage": None}
MORE = {"choices": [{"index": 0, "delta": {"content": "two"}}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": 64}},
}
BARE_USAGE = {"choices": [], "usage": {"prompt_tokens": 70, "prompt_tokens_details": None}}
MESSAGES = [{"role": "user", "content": "How many barges?"}]


def stream(*chunks):
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*events, "data: [DONE]\n\n"])


@asynccontextmanager
async def asking(body, *, headers=HEADERS, status=200):
    async def answer(request):
        assert (await request.json())["stream_options"] == {"include_usage": True}
        return web.Response(
            text=body, headers=headers, status=status, content_type="text/event-stream"
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield ask(session, str(server.make_url("")).rstrip("/"), model="tiny", messages=MESSAGES)


async def test_reply_holds_text_usage_and_routing():
    async with asking(stream(ROLE, TEXT, MORE, USAGE)) as pending:
        reply = await pending
    assert reply.text == "forty-two"
    assert (reply.engine, reply.reason) == ("engine-a", "prefix-hit")
    assert (reply.prompt_tokens, reply.cached_tokens) == (70, 64)
    assert reply.predicted_cached_tokens == 64
    assert 0 < reply.ttft_seconds < 10


async def test_numbers_that_are_not_reported_are_unknown():
    headers = {"x-nearkv-engine": "engine-a", "x-nearkv-reason": "miss"}
    async with asking(stream(TEXT, BARE_USAGE), headers=headers) as pending:
        reply = await pending
    assert reply.cached_tokens is None
    assert reply.predicted_cached_tokens is None


@pytest.mark.parametrize(
    ("body", "answer", "message"),
    [
        ("no room", {"status": 429}, "429: no room"),
        (stream(TEXT), {}, "without usage"),
        (stream(ROLE, USAGE), {}, "without text"),
        ("data: {oops\n\n", {}, "cannot be read: {oops"),
        (stream(TEXT, USAGE), {"headers": {}}, "x-nearkv-engine"),
    ],
    ids=["refused", "no-usage", "no-text", "garbage", "no-routing-headers"],
)
async def test_incomplete_answer_is_an_error(body, answer, message):
    async with asking(body, **answer) as pending:
        with pytest.raises(ScenarioError, match=message):
            await pending


async def test_unreachable_ingress_is_an_error(unused_tcp_port):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ScenarioError, match="failed"):
            await ask(
                session, f"http://127.0.0.1:{unused_tcp_port}", model="tiny", messages=MESSAGES
            )
