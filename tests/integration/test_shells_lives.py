"""Requests whose client or engine goes away, at every stage; and many at once."""

import asyncio
import random

import pytest

from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.raw_http import raw_engine, request
from tests.integration.stack import eventually, running_ingress, small_fleet

RENDER = "/v1/completions/render"
BODY = b'{"model": "tiny", "prompt": "hello there", "max_tokens": 40, "stream": true}'
ASKED = request("POST /v1/completions", "Content-Type: application/json", body=BODY)


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192, **config))


async def nothing_is_left(ingress, *engines):
    know = ingress.knowledge
    await eventually(lambda: know.in_flight.count == 0, what="no request is in flight")
    await eventually(lambda: know.ledger.total_requests == 0, what="the ledger is empty")
    await eventually(
        lambda: all(rank.statistics.running == 0 for e in engines for rank in e.ranks),
        what="the engines are idle",
    )


def asked_for(engine, path):
    return engine.record.counts.get(path, 0)


@pytest.mark.parametrize(
    ("sent", "slow_path", "stage"),
    [
        (ASKED[:-20], None, "body"),
        (ASKED, RENDER, "tokens"),
        (ASKED, "/v1/completions", "first byte"),
        (ASKED, None, "stream"),
    ],
    ids=["body", "tokens", "first-byte", "stream"],
)
async def test_a_client_may_leave_at_any_stage(sent, slow_path, stage):
    async with (
        double(decode_seconds_per_token=0.05) as engine,
        small_fleet(engine) as (ingress, _),
    ):
        if slow_path is not None:
            await engine.inject(Faults(hang_seconds=30.0, paths=(slow_path,)))
        host, port = ingress.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        know = ingress.knowledge
        await eventually(lambda: know.in_flight.count == 1, what="it is under way")
        if slow_path is not None:
            await eventually(lambda: asked_for(engine, slow_path), what=f"it waits for {stage}")
        if stage == "stream":
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        await nothing_is_left(ingress, engine)
        await engine.inject(Faults())
        response, _ = await ingress.complete("still here")
        assert response.status == 200


async def test_clients_that_leave_at_random_leave_nothing_behind():
    chance = random.Random(7)
    async with (
        double(decode_seconds_per_token=0.002) as a,
        double(decode_seconds_per_token=0.002) as b,
        small_fleet(a, b) as (ingress, _),
    ):
        host, port = ingress.url.removeprefix("http://").split(":")

        async def ask_and_leave():
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(ASKED)
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.25)):
                    await reader.readuntil(b"[DONE]")
            except TimeoutError:
                pass
            writer.transport.abort()

        await asyncio.gather(*(ask_and_leave() for _ in range(100)))
        await nothing_is_left(ingress, a, b)


async def test_a_hundred_mixed_requests_at_once_each_get_their_own_answer():
    async with (
        double(decode_seconds_per_token=0.001) as a,
        double(decode_seconds_per_token=0.001) as b,
        small_fleet(a, b) as (ingress, _),
    ):

        async def ask(number):
            body = {
                "model": "tiny",
                "prompt": f"Prompt number {number}. " * (1 + number % 40),
                "max_tokens": 5 + number % 30,
                "stream": number % 2 == 0,
            }
            headers = {"X-Request-Id": f"n{number}"}
            url = ingress.url + "/v1/completions"
            async with ingress.session.post(url, json=body, headers=headers) as response:
                return response, await response.text()

        answers = await asyncio.gather(*(ask(number) for number in range(100)))
        for number, (response, text) in enumerate(answers):
            assert response.status == 200
            assert response.headers["X-Request-Id"] == f"n{number}"
            assert text.endswith("data: [DONE]\n\n") == (number % 2 == 0)
        served = [response.headers["x-nearkv-engine"] for response, _ in answers]
        assert 25 <= served.count("a") <= 75
        await nothing_is_left(ingress, a, b)


@pytest.mark.parametrize("path", [RENDER, "/tokenize"], ids=["render", "tokenize"])
async def test_an_engine_that_hangs_up_on_tokenization_still_serves(path):
    async with double() as engine, small_fleet(engine) as (ingress, _):
        if path == "/tokenize":
            await engine.inject(Faults(answer_status=404, paths=(RENDER,), times=1))
            await ingress.complete("render is not offered")
        await engine.inject(Faults(close_before_first_byte=True, paths=(path,)))
        response, _ = await ingress.complete("hello")
        assert response.status == 200
        assert "x-nearkv-predicted-cached-tokens" not in response.headers
        await nothing_is_left(ingress, engine)


async def test_engines_that_come_and_go_under_load_cost_no_request_more_than_its_stream():
    async with (
        double(decode_seconds_per_token=0.002) as a,
        double(decode_seconds_per_token=0.002) as b,
        small_fleet(a, b) as (ingress, _),
    ):
        statuses = []
        stop = asyncio.Event()

        async def keep_asking(number):
            while not stop.is_set():
                response, _ = await ingress.complete(f"client {number}", max_tokens=10)
                statuses.append(response.status)

        async with asyncio.TaskGroup() as clients:
            for number in range(10):
                clients.create_task(keep_asking(number))
            for _ in range(3):
                seen = len(statuses)
                await eventually(lambda seen=seen: len(statuses) > seen + 20, what="progress")
                await a.restart()
            stop.set()
        assert set(statuses) == {200}
        await nothing_is_left(ingress, a, b)


async def test_a_request_is_dispatched_at_most_twice():
    async def hang_up(writer):
        writer.close()

    async with (
        raw_engine(hang_up) as a,
        raw_engine(hang_up) as b,
        raw_engine(hang_up) as c,
        running_ingress(
            engines=[{"id": e, "url": r.url} for e, r in (("a", a), ("b", b), ("c", c))],
            deadlines={"sync_seconds": 0.1},
        ) as ingress,
    ):
        response, _ = await ingress.post("/v1/x", {"model": None})
        assert response.status == 502
        assert len(a.requests) + len(b.requests) + len(c.requests) == 2
        await nothing_is_left(ingress)
