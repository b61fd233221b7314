"""The engine double answers the captured requests as the real engine did."""

import json

import aiohttp
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.doubles.engine.captured import CAPTURED_CONFIG, Exchange, captured_exchanges

# Values that are made up per answer; only their types are compared.
_MADE_UP = {"id", "created", "request_id", "text", "content", "system_fingerprint", "root"}
_EXACT_LISTS = {"tokens", "token_ids"}


def shape(value, key=""):
    """Reduce a body to what must be equal: keys, types, and values that are not made up."""
    if isinstance(value, dict):
        return {name: shape(item, name) for name, item in value.items()}
    if isinstance(value, list) and key not in _EXACT_LISTS:
        return [shape(item, key) for item in value]
    return type(value).__name__ if key in _MADE_UP else value


def parse(text):
    if not text.startswith("data: "):
        return json.loads(text)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def expected_shape(exchange: Exchange):
    body = shape(parse(exchange.response))
    if exchange.name == "generate_tokens":
        body["choices"][0]["token_ids"] = 2
    if exchange.name == "kv_event_sources":
        body["0"] |= {"endpoint": "tcp://*", "replay_endpoint": "tcp://*"}
    return body


def actual_shape(exchange: Exchange, text: str):
    body = shape(parse(text))
    if exchange.name == "generate_tokens":
        body["choices"][0]["token_ids"] = len(body["choices"][0]["token_ids"])
    if exchange.name == "kv_event_sources":
        for key in ("endpoint", "replay_endpoint"):
            body["0"][key] = body["0"][key].rpartition(":")[0]
    return body


async def ask(session, engine, exchange: Exchange):
    body = {} if exchange.request is None else {"json": exchange.request}
    return await session.request(
        exchange.method, engine.url + exchange.path, headers=exchange.request_headers, **body
    )


async def test_captured_requests_get_equal_answers():
    async with EngineDouble(CAPTURED_CONFIG) as engine, aiohttp.ClientSession() as session:
        for exchange in captured_exchanges():
            async with await ask(session, engine, exchange) as response:
                text = await response.text()
                found = (exchange.name, response.status, actual_shape(exchange, text))
                assert found == (exchange.name, exchange.status, expected_shape(exchange))
                for header in ("content-type", "vary", "endpoint-load-metrics"):
                    wanted = exchange.response_headers.get(header)
                    assert response.headers.get(header) == wanted, exchange.name


@pytest.fixture
async def engine():
    async with EngineDouble(EngineDoubleConfig(loras=("sql",), max_model_len=512)) as engine:
        yield engine


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


async def post(session, engine, path, body, **headers):
    async with session.post(engine.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        pytest.param("hello world", [5], id="text"),
        pytest.param([1, 2, 3], [3], id="token-ids"),
        pytest.param(["hello world", "hello"], [5, 3], id="several-texts"),
        pytest.param([[1, 2], [3]], [2, 1], id="several-token-ids"),
    ],
)
async def test_prompt_forms(session, engine, prompt, lengths):
    status, body = await post(session, engine, "/v1/completions", {"prompt": prompt})
    assert status == 200
    assert len(body["choices"]) == len(lengths)
    assert body["usage"]["prompt_tokens"] == sum(lengths)


@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        pytest.param("/v1/completions", b'{"prompt": "x"', "body.0", id="truncated"),
        pytest.param("/v1/completions", b"[]", "body", id="not-an-object"),
        pytest.param("/v1/completions", b"{}", "body.prompt", id="missing"),
        pytest.param("/v1/completions", b'{"prompt": 5}', "body.prompt", id="number-prompt"),
        pytest.param("/v1/completions", b'{"prompt": ""}', "prompt", id="empty-prompt"),
        pytest.param("/v1/completions", b'{"prompt": []}', "prompt", id="empty-list"),
        pytest.param("/v1/completions", b'{"prompt": ["a", 1]}', "prompt", id="mixed"),
        pytest.param(
            "/v1/completions", b'{"prompt": "x", "max_tokens": 0}', "max_tokens", id="zero"
        ),
        pytest.param(
            "/v1/completions", b'{"prompt": "x", "max_tokens": 600}', "input_tokens", id="no-room"
        ),
        pytest.param("/v1/completions", b'{"prompt": "\xff"}', "body.0", id="not-utf-8"),
        pytest.param("/v1/chat/completions", b'{"messages": 1}', "messages", id="bad-messages"),
        pytest.param("/v1/chat/completions", b'{"messages": [1]}', "messages", id="bad-message"),
    ],
)
async def test_refused_bodies(session, engine, path, raw, param):
    async with session.post(engine.url + path, data=raw) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, 400, param)


async def test_numbers_in_strings_are_accepted_as_pydantic_does(session, engine):
    body = {"prompt": "x", "max_tokens": "3"}
    _, answer = await post(session, engine, "/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("GET", "/v1/nothing", 404, id="unknown"),
        pytest.param("GET", "/v1/completions", 405, id="method"),
        pytest.param("GET", "/health", 200, id="health"),
    ],
)
async def test_other_statuses(session, engine, method, path, status):
    async with session.request(method, engine.url + path) as response:
        assert response.status == status


@pytest.mark.parametrize("path", ["/v1/completions/render", "/inference/v1/generate"])
async def test_scale_out_paths_are_forbidden_unless_enabled(session, path):
    async with EngineDouble(EngineDoubleConfig(scale_out=False)) as engine:
        status, body = await post(session, engine, path, {"prompt": "x", "token_ids": [1]})
    assert (status, body["error"]["code"]) == (403, 403)


async def test_details_are_null_unless_enabled(session):
    async with EngineDouble(EngineDoubleConfig(prompt_tokens_details=False)) as engine:
        _, body = await post(session, engine, "/v1/completions", {"prompt": "x"})
    assert body["usage"]["prompt_tokens_details"] is None


async def test_token_strings_are_vocabulary_entries(session, engine):
    body = {"prompt": "hello world", "return_token_strs": True}
    _, answer = await post(session, engine, "/tokenize", body)
    assert len(answer["token_strs"]) == answer["count"]
    assert "".join(answer["token_strs"]) == "helloĠworld"


async def test_answer_continues_on_the_same_tokens(session, engine):
    prompt = "The quick brown fox jumps over the lazy dog."
    _, answer = await post(session, engine, "/v1/completions", {"prompt": prompt, "max_tokens": 40})
    longer = prompt + answer["choices"][0]["text"]
    _, again = await post(session, engine, "/tokenize", {"prompt": longer})
    assert again["count"] == answer["usage"]["total_tokens"]


async def test_completion_stream_equals_the_whole_answer(session, engine):
    body = {"prompt": "hello", "max_tokens": 4}
    _, whole = await post(session, engine, "/v1/completions", body)
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(engine.url + "/v1/completions", json=streamed) as response:
        *pieces, usage = parse(await response.text())
    assert "".join(p["choices"][0]["text"] for p in pieces) == whole["choices"][0]["text"]
    assert [p["choices"][0]["finish_reason"] for p in pieces] == [None, None, None, "length"]
    assert usage["usage"]["completion_tokens"] == 4


async def test_embeddings_are_deterministic(session, engine):
    body = {"input": ["a", "b", "a"]}
    _, answer = await post(session, engine, "/v1/embeddings", body)
    first, second, third = [item["embedding"] for item in answer["data"]]
    assert first == third != second
    assert answer["usage"]["total_tokens"] == 3


async def test_transfer_params_of_a_prefill_leg(session, engine):
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "unknown": {"a": 1}}
    body = {"prompt": "hello world", "max_tokens": 1, "kv_transfer_params": asked}
    _, answer = await post(session, engine, "/v1/completions", body)
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["unknown"] == {"a": 1}
    assert params["remote_num_tokens"] == 5
    assert [len(group) for group in params["remote_block_ids"]] == [1]


async def test_decode_leg_computes_only_the_last_token(session, engine):
    body = {"prompt": "hello world", "kv_transfer_params": {"do_remote_prefill": True}}
    _, answer = await post(session, engine, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert answer["kv_transfer_params"] is None


async def test_further_keys_of_transfer_params_are_those_configured(session):
    config = EngineDoubleConfig(publish_events=False, transfer_keys='{"remote_epoch": "e1"}')
    async with EngineDouble(config) as engine:
        asked = {"do_remote_decode": True}
        body = {"prompt": "hello world", "max_tokens": 1, "kv_transfer_params": asked}
        _, answer = await post(session, engine, "/v1/completions", body)
        assert answer["kv_transfer_params"]["remote_epoch"] == "e1"
        await engine.inject(Faults(withhold_transfer_params=True))
        _, answer = await post(session, engine, "/v1/completions", body)
        assert answer["kv_transfer_params"] is None


async def test_transfer_params_can_be_rejected(session, engine):
    await engine.inject(Faults(reject_transfer_params=True))
    body = {"prompt": "hello world", "kv_transfer_params": {"do_remote_prefill": True}}
    assert (await post(session, engine, "/v1/completions", body))[0] == 400
    plain = {"prompt": "hello world"}
    assert (await post(session, engine, "/v1/completions", plain))[0] == 200


def test_transfer_keys_must_be_an_object():
    with pytest.raises(ValueError, match="transfer_keys"):
        EngineDoubleConfig(transfer_keys="[1]")


async def test_request_id_header_names_the_answer(session, engine):
    headers = {"X-Request-Id": "abc"}
    _, answer = await post(session, engine, "/v1/completions", {"prompt": "x"}, **headers)
    assert answer["id"] == "cmpl-abc"


async def test_received_requests_are_listed(session, engine):
    await post(session, engine, "/tokenize", {"prompt": "x"}, **{"X-Session-ID": "s"})
    async with session.get(engine.url + "/double/requests") as response:
        record = await response.json()
    assert record["counts"] == {"/tokenize": 1}
    assert record["requests"][0]["headers"]["x-session-id"] == "s"
    assert record["requests"][0]["body"] == {"prompt": "x"}


async def test_chat_forms_render_alike(session, engine):
    plain = [{"role": "user", "content": "hello world"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}]
    answers = [
        await post(session, engine, "/tokenize", {"messages": messages})
        for messages in (plain, parts)
    ]
    assert answers[0] == answers[1]
