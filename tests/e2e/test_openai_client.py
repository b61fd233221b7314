"""The official OpenAI client against the ingress, as users have it."""

import openai
import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.stack import eventually, small_fleet

MESSAGES = [{"role": "user", "content": "Who works at the pass?"}]
QUESTION = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8}


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192, **config))


@pytest.fixture
async def engine():
    async with double() as engine:
        yield engine


@pytest.fixture
async def ingress(engine):
    async with small_fleet(engine) as (ingress, _):
        yield ingress
        assert ingress.knowledge.ledger.total_requests == 0
        assert ingress.knowledge.in_flight.count == 0


@pytest.fixture
async def client(ingress):
    async with openai.AsyncOpenAI(
        base_url=ingress.url + "/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_chat(client):
    answer = await client.chat.completions.create(**QUESTION)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


async def test_chat_stream_says_the_same_as_the_whole_answer(client):
    whole = await client.chat.completions.create(**QUESTION, temperature=0)
    stream = await client.chat.completions.create(
        **QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


async def test_completions_whole_and_streamed(client):
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    whole = await client.completions.create(**asked)
    stream = await client.completions.create(**asked, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text


async def test_embeddings(client):
    answer = await client.embeddings.create(model="tiny", input=["a", "b"])
    assert len(answer.data) == 2


async def test_raw_answers_say_where_they_came_from(client):
    raw = await client.chat.completions.with_raw_response.create(
        **QUESTION, extra_headers={"X-Session-ID": "s1", "X-Request-Id": "mine"}
    )
    assert raw.headers["x-nearkv-engine"] == "a"
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().choices


async def test_a_stream_that_is_left_early_frees_the_engine():
    async with (
        double(decode_seconds_per_token=0.05) as engine,
        small_fleet(engine) as (ingress, _),
        openai.AsyncOpenAI(base_url=ingress.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        asked = QUESTION | {"max_tokens": 4000}
        async with await client.chat.completions.create(**asked, stream=True) as stream:
            await anext(aiter(stream))
            assert ingress.knowledge.ledger.total_requests == 1
        know = ingress.knowledge
        await eventually(lambda: know.ledger.total_requests == 0, what="the ledger is empty")
        await eventually(
            lambda: all(rank.statistics.running == 0 for rank in engine.ranks), what="it is idle"
        )


async def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(**QUESTION | {"model": "nope"})
    assert caught.value.param == "model"
    assert "tiny" in caught.value.message


async def test_a_field_of_the_wrong_type_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny", prompt=7)


async def test_engines_that_fail_are_a_server_error(client, engine):
    await engine.inject(Faults(close_before_first_byte=True))
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(**QUESTION)
    assert caught.value.status_code == 502


async def test_a_stream_that_breaks_raises_instead_of_ending(client, engine):
    await engine.inject(Faults(die_after_chunks=3))
    stream = await client.chat.completions.create(**QUESTION | {"max_tokens": 50}, stream=True)
    with pytest.raises(openai.APIError, match="failed in the middle"):
        _ = [chunk async for chunk in stream]


async def test_no_room_is_a_rate_limit_that_says_when_to_come_back():
    async with (
        double(decode_seconds_per_token=0.05) as engine,
        small_fleet(engine, limits={"max_in_flight": 1}) as (ingress, _),
        openai.AsyncOpenAI(base_url=ingress.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        asked = QUESTION | {"max_tokens": 4000}
        async with await client.chat.completions.create(**asked, stream=True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**QUESTION)
        assert int(caught.value.response.headers["retry-after"]) >= 1
