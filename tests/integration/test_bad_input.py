"""Bad input and failing peers: a clear answer each, and nothing else disturbed."""

import asyncio
import io
import json

import pytest
from aiohttp import web

from nearkv.serving import running
from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.integration.stack import (
    ANY_PORT,
    eventually,
    running_agent,
    running_ingress,
    small_fleet,
)


def double(**config):
    return EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192, **config))


@pytest.fixture
async def fleet():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        yield ingress
        # Whatever was thrown at it: the next request is served, and nothing is left counted.
        response, _ = await ingress.complete("still here")
        assert response.status == 200
        assert ingress.knowledge.ledger.total_requests == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b'{"model": "tiny", "prompt": "x"', 400, None),
        ("/v1/completions", b"\xff\xfe", 400, None),
        ("/v1/completions", b"[]", 400, None),
        ("/v1/completions", b'{"model": 7, "prompt": "x"}', 400, "model"),
        ("/v1/completions", b'{"model": "tiny", "prompt": 7}', 400, "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [1, -2]}', 400, "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": "x", "stream": "yes"}', 400, "stream"),
        ("/v1/completions", b"[" * 100_000, 400, None),
        ("/v1/chat/completions", b'{"model": "tiny"}', 400, "messages"),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": {}}', 400, "messages"),
        ("/v1/completions", b'{"model": "nope", "prompt": "x"}', 404, "model"),
        ("/v1/completions", b'{"model": "tiny", "prompt": "x", "max_tokens": "many"}', 400, ...),
    ],
    ids=[
        "truncated", "not-utf8", "not-object", "model-type", "prompt-type", "negative-token",
        "stream-type", "deep", "no-messages", "messages-type", "unknown-model", "engine-judges",
    ],
)  # fmt: skip
async def test_bad_bodies_get_the_openai_envelope(fleet, path, body, status, param):
    headers = {"Content-Type": "application/json"}
    async with fleet.session.post(fleet.url + path, data=body, headers=headers) as response:
        answer = await response.json()
    assert response.status == status
    assert {"message", "type", "param", "code"} <= answer["error"].keys()
    assert answer["error"]["code"] == status
    if param is not ...:
        assert answer["error"]["param"] == param
    assert "x-nearkv-engine" in response.headers
    assert "x-nearkv-reason" in response.headers


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
async def test_a_body_over_the_limit_gets_413(fleet, chunked):
    body = json.dumps({"model": "tiny", "prompt": "x" * 10_000_000}).encode()

    async def pieces():
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    async with fleet.session.post(
        fleet.url + "/v1/completions", data=pieces() if chunked else io.BytesIO(body)
    ) as response:
        answer = await response.json()
    assert response.status == 413
    assert "limit" in answer["error"]["message"]
    assert response.headers["x-nearkv-reason"] == "body_too_large"


async def test_control_headers_do_not_reach_the_engine():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        await ingress.complete(
            "x",
            headers={
                "x-prefiller-host-port": "10.0.0.1:80",
                "X-Gateway-Destination-Endpoint": "10.0.0.1:80",
                "x-nearkv-engine": "evil",
                "X-data-parallel-rank": "7",
                "X-Request-Id": "bad id\twith spaces",
                "X-Tenant": "kept",
            },
        )
        (seen,) = [r for r in engine.record if r.path == "/v1/completions"]
        names = {name.lower() for name in seen.headers}
        assert not names & {
            "x-prefiller-host-port",
            "x-gateway-destination-endpoint",
            "x-nearkv-engine",
            "x-data-parallel-rank",
        }


async def test_header_injection_is_refused(fleet):
    host, _, port = fleet.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Session-ID: a\r b\x00c\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )
    async with asyncio.timeout(30):
        status_line = await reader.readline()
    writer.close()
    assert b" 400 " in status_line


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "fault",
    [
        {"close_before_first_byte": True},
        {"answer_status": 503},
        {"refuse_connections_seconds": 60.0},
    ],
    ids=["hangs-up", "503", "refused"],
)
async def test_a_failure_before_the_first_byte_is_retried_on_another_engine(stream, fault):
    async with double() as a, double() as b, small_fleet(a, b) as (ingress, _):
        await a.inject(Faults(**fault))
        for _ in range(4):
            response, _ = (
                await ingress.complete("hello", stream=stream)
                if not stream
                else (await _stream(ingress))
            )
            assert response.status == 200
            assert response.headers["x-nearkv-engine"] == "b"


async def _stream(ingress):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "stream": True}
    async with ingress.session.post(ingress.url + "/v1/completions", json=body) as response:
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    return response, text


async def test_an_engine_that_dies_mid_stream_ends_with_an_error_event():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        await engine.inject(Faults(die_after_chunks=3))
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 50, "stream": True}
        async with ingress.session.post(ingress.url + "/v1/completions", json=body) as response:
            events = [e for e in (await response.text()).split("\n\n") if e]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == 502
        assert "data: [DONE]" not in events
        assert ingress.knowledge.ledger.total_requests == 0
        await engine.inject(Faults())
        response, _ = await ingress.complete("hello")
        assert response.status == 200


async def test_when_every_engine_fails_the_client_is_told():
    async with double() as engine, small_fleet(engine) as (ingress, _):
        await engine.inject(Faults(close_before_first_byte=True))
        response, answer = await ingress.complete("hello")
        assert response.status == 502
        assert response.headers["x-nearkv-reason"] == "engine_failed"
        assert "failed before the first byte" in answer["error"]["message"]


async def test_a_silent_engine_runs_into_the_first_byte_deadline():
    deadlines = {"first_byte_seconds": 0.3}
    async with double() as engine, small_fleet(engine, deadlines=deadlines) as (ingress, _):
        await engine.inject(Faults(hang_seconds=30.0))
        response, _ = await ingress.complete("hello")
        assert response.status == 504
        assert response.headers["x-nearkv-reason"] == "engine_timeout"


async def test_a_client_that_leaves_cancels_the_engine_s_work():
    async with (
        double(decode_seconds_per_token=0.05) as engine,
        small_fleet(engine) as (ingress, _),
    ):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4000, "stream": True}
        response = await ingress.session.post(ingress.url + "/v1/completions", json=body)
        await response.content.readany()
        assert ingress.knowledge.ledger.total_requests == 1
        response.close()
        await eventually(
            lambda: ingress.knowledge.ledger.total_requests == 0, what="ledger is empty"
        )
        await eventually(
            lambda: all(rank.statistics.running == 0 for rank in engine.ranks),
            what="engine stopped",
        )


async def test_below_the_free_kv_threshold_requests_get_429():
    async with (
        double(decode_seconds_per_token=0.05) as engine,
        small_fleet(engine, gate={"min_free_ratio": 0.99}) as (ingress, _),
    ):
        body = {"model": "tiny", "prompt": "word " * 1500, "max_tokens": 400, "stream": True}
        busy = await ingress.session.post(ingress.url + "/v1/completions", json=body)
        await busy.content.readany()
        response, answer = await ingress.complete("hello")
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["x-nearkv-reason"] == "no_kv_room"
        assert "scale up" in answer["error"]["message"]
        busy.close()


async def test_an_agent_that_sends_garbage_disturbs_nobody():
    async def garbage(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"\x00\x00\x00\x05hello" * 100)
        return response

    liar = web.Application()
    liar.router.add_get("/v1/state/stream", garbage)
    async with (
        double() as engine,
        running_agent(engine) as agent,
        running(liar, ANY_PORT) as address,
        running_ingress(agent.url, address.url, deadlines={"sync_seconds": 0.2}) as ingress,
    ):
        lying = ingress.knowledge.fleet.agents[address.url]
        await eventually(lambda: lying.error, what="the garbage is noticed")
        await ingress.synced(agent)
        response, _ = await ingress.complete("hello")
        assert response.status == 200
        assert response.headers["x-nearkv-engine"] == "a"


async def test_garbage_events_of_one_engine_are_counted_and_survived():
    async with double() as engine, small_fleet(engine) as (ingress, agent):
        await engine.inject(Faults(garbage_event_batches=1))
        await ingress.complete("first " * 200)
        counts = agent.state.trackers["a"].counts
        await eventually(lambda: counts.undecodable == 1, what="garbage is counted")
        response, _ = await ingress.complete("hello")
        assert response.status == 200


async def test_lost_events_are_replayed():
    async with double() as engine, small_fleet(engine) as (ingress, agent):
        await ingress.complete("the event stream is under way now " * 10)
        await ingress.synced(agent)
        prompt = "first " * 200
        await engine.inject(Faults(drop_event_batches=1))
        await ingress.complete(prompt)
        await ingress.complete("other " * 200)
        await eventually(
            lambda: (
                agent.state.trackers["a"].counts.gaps == 1
                and agent.state.trackers["a"].info.events == "live"
            ),
            what="the gap is closed",
        )
        await ingress.synced(agent)
        response, body = await ingress.complete(prompt)
        reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(response.headers["x-nearkv-predicted-cached-tokens"]) == reported > 0
