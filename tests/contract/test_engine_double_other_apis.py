"""The engine double answers /v1/responses and /v1/messages as the real engine did."""

import json

import aiohttp
import msgspec
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.doubles.engine.captured import CAPTURED, CAPTURED_CONFIG, Exchange

MADE_UP = {"id", "item_id", "request_id", "created_at", "text", "delta"}
"""Values that are made up per answer; only their types are compared."""
WORDED_OTHERWISE = {"responses_no_input", "messages_no_messages", "messages_too_long"}
UNTOLD = {"extra_args"}
"""Sampling values of the real engine that say nothing."""


def captured():
    lines = (CAPTURED / "http_other_apis.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Exchange) for line in lines]


def shape(value, name, key=""):
    if isinstance(value, dict):
        made_up = MADE_UP | ({"message"} if name in WORDED_OTHERWISE else set())
        return {
            k: type(v).__name__ if k in made_up and not isinstance(v, dict) else shape(v, name, k)
            for k, v in value.items()
            if k not in UNTOLD
        }
    return [shape(item, name, key) for item in value] if isinstance(value, list) else value


def parse(text, name):
    """Return the body, or the events, of which those that bring text come in any number."""
    if not text.startswith("event: "):
        body = shape(json.loads(text), name)
        sampling = body.get("sampling_params", {})
        # A top_p of 1 is said or not, by API.
        return body | {"sampling_params": sampling and len(sampling) > 3}
    events = []
    for block in text.strip().split("\n\n"):
        named, data = block.split("\n")
        event = (named, shape(json.loads(data.removeprefix("data: ")), name))
        event[1].pop("sequence_number", None)
        if not events or events[-1] != event:
            events.append(event)
    return events


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


async def test_captured_requests_get_equal_answers(session):
    async with EngineDouble(CAPTURED_CONFIG) as engine:
        for exchange in captured():
            body = {} if exchange.request is None else {"json": exchange.request}
            async with session.request(
                exchange.method, engine.url + exchange.path, **body
            ) as response:
                text = await response.text()
            found = (exchange.name, response.status, parse(text, exchange.name))
            wanted = parse(exchange.response, exchange.name)
            assert found == (exchange.name, exchange.status, wanted)
            assert response.headers["content-type"] == exchange.response_headers["content-type"]


async def post(session, engine, path, **body):
    async with session.post(engine.url + path, json={"model": "tiny", **body}) as response:
        return response.status, await response.json()


async def test_a_stored_response_can_be_asked_for_and_gone_on_from(session):
    async with EngineDouble(EngineDoubleConfig(store_responses=True)) as engine:
        _, first = await post(session, engine, "/v1/responses", input="hello world")
        async with session.get(f"{engine.url}/v1/responses/{first['id']}") as response:
            assert await response.json() == first
        status, more = await post(
            session, engine, "/v1/responses", input="go on", previous_response_id=first["id"]
        )
        assert status == 200
        assert more["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        status, _ = await post(session, engine, f"/v1/responses/{first['id']}/cancel")
        assert status == 400
        await engine.restart()
        status, _ = await post(
            session, engine, "/v1/responses", input="x", previous_response_id=first["id"]
        )
        assert status == 404


async def test_without_a_store_nothing_is_kept(session):
    async with EngineDouble(EngineDoubleConfig()) as engine:
        _, first = await post(session, engine, "/v1/responses", input="hello world")
        async with session.get(f"{engine.url}/v1/responses/{first['id']}") as response:
            assert response.status == 404


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_older_engines_do_not_render_them_or_lack_them(session, path):
    body = {"input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    async with EngineDouble(EngineDoubleConfig(render_other_apis=False)) as engine:
        assert (await post(session, engine, f"{path}/render", **body))[0] == 404
        assert (await post(session, engine, path, **body))[0] == 200
    async with EngineDouble(EngineDoubleConfig(other_apis=False)) as engine:
        assert (await post(session, engine, path, **body))[0] == 404
